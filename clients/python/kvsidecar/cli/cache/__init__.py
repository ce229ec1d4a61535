"""``kvsidecar cache``: one file for each kind of question. They ask the daemon, or run ``cache_daemon.offline``.

May import ``kvsidecar`` and nothing of the servers.
"""

from __future__ import annotations

import typer

from kvsidecar.cli.cache import chunk_list, offline, pin_delete, push_pull, stats_command, top, trace, watch

app = typer.Typer(
    no_args_is_help=True, help="Look at the cache daemon, tell it what to keep, and check or carry its store."
)
app.command("stats")(stats_command.stats)
app.command("list")(chunk_list.list_chunks)
app.command("show")(chunk_list.show)
app.command("pin")(pin_delete.pin)
app.command("unpin")(pin_delete.unpin)
app.command("delete")(pin_delete.delete)
app.command("push")(push_pull.push)
app.command("pull")(push_pull.pull)
app.command("top")(top.top)
app.command("watch")(watch.watch)
app.add_typer(trace.app, name="trace")
offline.add_to(app)
