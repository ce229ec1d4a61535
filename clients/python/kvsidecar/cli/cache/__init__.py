"""``kvsidecar cache``: one file for each kind of question. They ask the daemon, or run ``cache_daemon.offline``.

May import ``kvsidecar`` and nothing of the servers.
"""

from __future__ import annotations

import typer

from kvsidecar.cli.cache import carrying, keeping, listing, offline, statistics, top, trace, watch

app = typer.Typer(
    no_args_is_help=True, help="Look at the cache daemon, tell it what to keep, and check or carry its store."
)
app.command("stats")(statistics.stats)
app.command("list")(listing.list_chunks)
app.command("show")(listing.show)
app.command("pin")(keeping.pin)
app.command("unpin")(keeping.unpin)
app.command("delete")(keeping.delete)
app.command("push")(carrying.push)
app.command("pull")(carrying.pull)
app.command("top")(top.top)
app.command("watch")(watch.watch)
app.add_typer(trace.app, name="trace")
offline.add_to(app)
