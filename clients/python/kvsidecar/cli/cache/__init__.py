"""``kvsidecar cache``: inspects and manages the cache daemon, one module per command.

Commands call the daemon, or run ``cache_daemon.offline`` as a program. May import ``kvsidecar``, but not the servers.
"""

from __future__ import annotations

import typer

from kvsidecar.cli.cache import chunk_list, offline, pin_delete, push_pull, stats_command, top, trace, watch

app = typer.Typer(
    no_args_is_help=True, help="Inspect the cache daemon, pin or delete chunks, check or transfer its store."
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
