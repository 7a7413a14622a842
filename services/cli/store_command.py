"""`dvla store inspect` and `dvla store dead`: look into a running store, and put dead groups back."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from dvla.v1 import store_pb2, store_pb2_grpc
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from services.cli.runfolder import find_run, read_json
from services.common.channels import CALL_SECONDS, open_channel, translated
from services.common.config import RoleConfig
from services.common.errors import ConfigError
from services.common.security import Security

LETTERS = 1000

Out = Annotated[Path, Parameter(help="Folder of all runs.")]
AsJson = Annotated[bool, Parameter(name="--json", help="Print JSON.", negative=())]
Token = Annotated[str, Parameter(help="File with the bearer token of the store.")]
Ca = Annotated[str, Parameter(help="PEM certificate authority of the store.")]
Run = Annotated[str, Parameter(help="Name of the run in the store; needed with an address.")]
Debug = Annotated[bool, Parameter(help="Show stack traces.", negative=())]

app = App(name="dvla store", help_format="plaintext", help_formatter="plain", version_flags=[])
dead = App(name="dead", help="Groups that a learner refused, with the reasons.")
app.command(dead)


@app.command
def inspect(
    where: str,
    *,
    run: Run = "",
    groups: int = 20,
    json: AsJson = False,
    token_file: Token = "",
    tls_ca: Ca = "",
    out: Out = Path("runs"),
    debug: Debug = False,
) -> None:
    """Show what lies in a store: runs, their groups by state and age, leases, dead letters, bytes.

    Parameters
    ----------
    where
        A running run, by name or folder, or the address of a store: unix:/path or host:port.
    groups
        Groups to list for each run, oldest first.
    """
    address, run = locate(where, run, out)
    with _Store(address, token_file, tls_ca) as stub, translated(f"store {address}"):
        reply = stub.Inspect(store_pb2.InspectRequest(run=run, groups=groups), timeout=CALL_SECONDS)
    if json:
        print(MessageToJson(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
    else:
        show(reply, Console())


@dead.command(name="list")
def list_dead(
    where: str,
    *,
    run: Run = "",
    json: AsJson = False,
    token_file: Token = "",
    tls_ca: Ca = "",
    out: Out = Path("runs"),
    debug: Debug = False,
) -> None:
    """List the dead letters of a run, oldest first.

    Parameters
    ----------
    where
        A running run, by name or folder, or the address of a store (then name the run).
    """
    address, run = locate(where, run, out, needed=True)
    with _Store(address, token_file, tls_ca) as stub, translated(f"store {address}"):
        reply = stub.ListDead(store_pb2.ListDeadRequest(run=run, limit=LETTERS), timeout=CALL_SECONDS)
    if json:
        print(MessageToJson(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return
    table = Table("letter", "group", "age", "reason", title=f"{len(reply.letters)} dead letters of {run}")
    for letter in reply.letters:
        table.add_row(letter.id, str(letter.group), _age(letter.age_seconds), letter.reason)
    Console().print(table)


@dead.command
def replay(
    where: str,
    letters: tuple[str, ...] = (),
    *,
    every: Annotated[bool, Parameter(name="--all", negative=())] = False,
    run: Run = "",
    token_file: Token = "",
    tls_ca: Ca = "",
    out: Out = Path("runs"),
    debug: Debug = False,
) -> None:
    """Put dead groups back under their old numbers, after what was wrong is mended.

    Parameters
    ----------
    where
        A running run, by name or folder, or the address of a store (then name the run).
    letters
        Letters, as `dead list` names them.
    every
        All letters.
    """
    address, run = locate(where, run, out, needed=True)
    if bool(letters) == every:
        raise ConfigError("name the letters to replay, or give --all; `dvla store dead list` shows them")
    with _Store(address, token_file, tls_ca) as stub, translated(f"store {address}"):
        if every:
            known = stub.ListDead(store_pb2.ListDeadRequest(run=run, limit=LETTERS), timeout=CALL_SECONDS).letters
            letters = tuple(letter.id for letter in known)
        for letter in letters:
            reply = stub.ReplayDead(store_pb2.ReplayDeadRequest(run=run, id=letter), timeout=CALL_SECONDS)
            print(f"group {reply.group} is back")
    if not letters:
        print("no dead letters", file=sys.stderr)


def locate(where: str, run: str, out: Path, needed: bool = False) -> tuple[str, str]:
    """Address of the store and name of the run in it. Raises ConfigError if the run is not running."""
    if where.startswith("unix:") or (":" in where and where.rpartition(":")[2].isdigit()):
        if needed and not run:
            raise ConfigError(f"which run of the store at {where}? name it with --run")
        return where, run
    folder = find_run(where, out)
    live = read_json(folder.live)
    if live is None or not folder.is_running():
        raise ConfigError(f"run {folder.name!r} is not running, so its store is not; give the address of a store")
    return live["addresses"]["store"], run or live["run"]


def show(reply: store_pb2.InspectResponse, console: Console) -> None:
    """Tables: runs, their oldest groups, arenas."""
    console.print(f"Redis {reply.redis}", highlight=False)
    runs = Table(
        "run", "epoch", "update", "open", "complete", "leased", "stream", "pending", "jobs", "workers", "dead", "bytes"
    )
    for run in reply.runs:
        stats = run.stats
        figures = (
            run.epoch,
            stats.update,
            stats.open_groups,
            stats.complete_groups,
            stats.leased_groups,
            run.stream_entries,
            run.stream_pending,
            stats.granted_jobs,
            stats.workers,
        )
        letters = f"{run.dead_letters}, {_age(run.oldest_dead_seconds)}" if run.dead_letters else "0"
        runs.add_row(run.run + (" (closed)" if run.finished else ""), *map(str, figures), letters, _size(stats.bytes))
    console.print(runs)
    for run in reply.runs:
        groups = Table(
            "group", "state", "filled", "bytes", "age", "deliveries", "workers", title=f"groups of {run.run}"
        )
        for group in run.groups:
            groups.add_row(
                str(group.group),
                group.state,
                f"{group.filled}/{group.members}",
                _size(group.bytes),
                _age(group.age_seconds),
                str(group.deliveries),
                ", ".join(group.workers),
            )
        console.print(groups)
    if reply.arenas:
        arenas = Table("arena", "replica", "extents", "bytes")
        for arena in reply.arenas:
            arenas.add_row(arena.arena, arena.address or "none now", str(arena.extents), _size(arena.bytes))
        console.print(arenas)


class _Store:
    def __init__(self, address: str, token_file: str, tls_ca: str) -> None:
        config = RoleConfig(token_file=token_file)
        self._channel = open_channel(address, Security(token=config.security().token, tls_ca=tls_ca))

    def __enter__(self) -> store_pb2_grpc.StoreServiceStub:
        return store_pb2_grpc.StoreServiceStub(self._channel)

    def __exit__(self, *error: object) -> None:
        self._channel.close()


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
