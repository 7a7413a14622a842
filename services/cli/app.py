"""The commands of `dvla` with their arguments and help. What they do is imported when they run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from services.common.config import report
from services.common.errors import ConfigError, DvlaError, NotFound

Overrides = Annotated[
    tuple[str, ...],
    Parameter(name="--set", help="Override a recipe key: section.key=value. May be given again.", negative=()),
]
Debug = Annotated[bool, Parameter(help="Show stack traces.", negative=())]

HELP = """Train robot policies with reinforcement learning; simulation, inference and training run at the same time.

Start with: dvla train recipes/pushcube.toml"""

app = App(name="dvla", help=HELP, help_format="plaintext", help_formatter="plain", version_flags=["--version"])


def run_command(tokens: Sequence[str], commands: App = app) -> int:
    """Run a command that is no role; a problem is one line, unless --debug asks for the stack trace."""
    debug = "--debug" in tokens
    try:
        code = commands(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        cause = error.__cause__
        return report(cause if isinstance(cause, DvlaError) else ConfigError(str(error)), debug)
    except NotFound as error:  # on the command line that is a name the user gave
        return report(ConfigError(str(error)), debug)
    except DvlaError as error:
        return report(error, debug)
    return code if isinstance(code, int) else 0


@app.command
def train(
    recipe: Path | None = None,
    *,
    overrides: Overrides = (),
    seed: int | None = None,
    mode: str | None = None,
    sims: int | None = None,
    rollouts: int | None = None,
    sim: str | None = None,
    name: str | None = None,
    out: Path | None = None,
    resume: str = "",
    debug: Debug = False,
) -> int:
    """Train a policy on this machine: starts all roles, shows them, and reports at the end.

    Parameters
    ----------
    recipe
        TOML recipe; recipes/ holds ready ones.
    seed
        Seed of the run (run.seed).
    mode
        async, or sync for strictly alternating (run.mode).
    sims
        Simulator processes (run.sims).
    rollouts
        Rollout workers (run.rollouts).
    sim
        A simulator of your own in place of the built-in one: module:Class, or the address of one that runs (run.sim).
    name
        Name of the run (run.name).
    out
        Folder of all runs (run.out).
    resume
        Go on with this interrupted run, by name or folder.
    """
    from services.cli.launch import train as launch

    return launch(
        recipe,
        resume,
        overrides,
        seed=seed,
        mode=mode,
        sims=sims,
        rollouts=rollouts,
        sim=sim,
        name=name,
        out=str(out) if out else None,
    )


@app.command(name="eval")
def evaluate(
    policy: str,
    *,
    recipe: Path | None = None,
    episodes: int | None = None,
    overrides: Overrides = (),
    sims: int | None = None,
    rollouts: int | None = None,
    sim: str | None = None,
    videos: int = 0,
    out: Path | None = None,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    debug: Debug = False,
) -> int:
    """Measure a policy on held-out starts: exactly so many episodes, each run to the horizon.

    Parameters
    ----------
    policy
        A run, by name or folder (its newest checkpoint), or the folder of a policy or checkpoint.
    recipe
        TOML recipe with the simulator; needed unless `policy` is a run or lies in one.
    episodes
        Number of episodes (eval.episodes).
    sims
        Simulator processes (run.sims).
    rollouts
        Rollout workers (run.rollouts).
    sim
        A simulator of your own: module:Class, or the address of one that runs (run.sim).
    videos
        Episodes to record.
    out
        Folder of all runs (run.out); the evaluation gets a folder there.
    json_file
        Also write the figures and every episode to this file.
    """
    from services.cli.eval_command import evaluate_policy

    given = {"sims": sims, "rollouts": rollouts, "sim": sim, "out": str(out) if out else None}
    extra = [f"eval.videos={videos}", *([f"eval.episodes={episodes}"] if episodes is not None else [])]
    return evaluate_policy(policy, recipe, [*overrides, *extra], json_file, given)


@app.command
def demos(recipe: Path, *, out: Path, overrides: Overrides = (), seed: int | None = None, debug: Debug = False) -> None:
    """Write demonstrations of the recipe's tasks with a scripted expert.

    Parameters
    ----------
    recipe
        TOML recipe; its sections [sim] and [demos] are read.
    out
        Folder to write.
    seed
        Seed (run.seed).
    """
    from services.cli.demos_command import write_demos
    from services.cli.recipe import load_recipe

    write_demos(load_recipe(recipe, overrides, seed=seed), out)


@app.command
def sft(
    recipe: Path,
    *,
    out: Path,
    demos: Path | None = None,
    config: Path | None = None,
    overrides: Overrides = (),
    seed: int | None = None,
    debug: Debug = False,
) -> None:
    """Clone demonstrations into a policy: the warm start of training.

    Parameters
    ----------
    recipe
        TOML recipe; its sections [policy] and [sft] are read.
    out
        Folder of the policy.
    demos
        Folder that `dvla demos` wrote.
    config
        The policy's configuration as JSON; by default its inputs and actions are those of the demonstrations.
    seed
        Seed (run.seed).
    """
    from services.cli.recipe import load_recipe
    from services.cli.warmstart import sft as clone

    clone(load_recipe(recipe, overrides, seed=seed), demos, out, config)


@app.command
def record(
    recipe: Path,
    *,
    sim: str,
    policy: Path,
    out: Path,
    episodes: int | None = None,
    overrides: Overrides = (),
    debug: Debug = False,
) -> None:
    """Record held-out episodes of a policy in a running simulator, as mp4 files.

    Parameters
    ----------
    recipe
        TOML recipe; its section [eval] is read.
    sim
        Address of a running simulator.
    policy
        Folder of the policy.
    out
        Folder of the videos.
    episodes
        Number of videos (eval.videos).
    """
    from services.cli.recipe import load_recipe
    from services.cli.warmstart import record_videos

    checked = load_recipe(recipe, overrides)
    for path in record_videos(checked, sim, policy, out, checked.eval.videos if episodes is None else episodes):
        print(path)


@app.command
def profile(
    recipe: Path,
    *,
    to: Path = Path("profile.json"),
    quick: bool = False,
    envs: tuple[int, ...] = (),
    overrides: Overrides = (),
    debug: Debug = False,
) -> None:
    """Measure simulation, inference, training and publishing of a recipe on this machine, each by itself.

    Parameters
    ----------
    recipe
        TOML recipe.
    to
        File to write, for `dvla plan`.
    quick
        Few sizes and short times.
    envs
        Numbers of environments to measure; may be given again.
    """
    from services.cli.profile_command import write_profile
    from services.cli.recipe import load_recipe

    write_profile(load_recipe(recipe, overrides), to, quick, envs)


@app.command
def plan(
    profile: Path,
    inventory: Path,
    *,
    write: tuple[Path, ...] = (),
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    debug: Debug = False,
) -> None:
    """Find environments, split and placement with the highest predicted throughput; say what holds it back.

    Parameters
    ----------
    profile
        What `dvla profile` wrote.
    inventory
        TOML file with [[nodes]] and [links]; docs/performance.md shows one.
    write
        Also write the plan: a *.toml recipe fragment, a compose override (*.yml), or kubernetes*.yaml.
    json_file
        Also write the plan to this file.
    """
    from services.cli.plan_command import make_plan

    make_plan(profile, inventory, write, json_file)


@app.command
def top(run: str = "", *, out: Path = Path("runs"), debug: Debug = False) -> int:
    """Look at a running run: the live view of `dvla train` in another terminal.

    Parameters
    ----------
    run
        Name or folder; by default the newest that is running.
    out
        Folder of all runs.
    """
    from services.cli.top import watch

    return watch(run, out)


@app.command(name="report")
def write_report(run: str, *, out: Path = Path("runs"), debug: Debug = False) -> None:
    """Write report.html of a run again, finished or not.

    Parameters
    ----------
    run
        Name or folder.
    out
        Folder of all runs.
    """
    from services.cli.report import write_report as render
    from services.cli.runfolder import find_run

    print(render(find_run(run, out)))


@app.command
def trace(
    run: str = "",
    *,
    address: tuple[str, ...] = (),
    token_file: str = "",
    out: Path = Path("runs"),
    to: Path | None = None,
    debug: Debug = False,
) -> None:
    """Write what each lane did when as a Chrome trace; look at it in ui.perfetto.dev.

    Parameters
    ----------
    run
        Name or folder of a run, running or finished.
    address
        In place of a run: a running role, unix:/path or host:port; may be given again. Its newest spans are read.
    token_file
        File with the bearer token of these roles.
    out
        Folder of all runs.
    to
        File to write; by default trace.json in the run folder, or here.
    """
    from services.cli.trace import trace_roles, trace_run
    from services.common.config import RoleConfig, check_address

    if bool(run) == bool(address):
        raise ConfigError("give the name of a run, or --address of running roles; `dvla runs list` lists runs")
    for one in address:
        check_address("address", one)
    if run:
        print(trace_run(run, out, to))
    else:
        print(trace_roles(address, RoleConfig(token_file=token_file).security(), to or Path("trace.json")))


@app.command(name="runs")
def list_all(action: str = "list", *, out: Path = Path("runs"), debug: Debug = False) -> None:
    """List all runs: state, success and result.

    Parameters
    ----------
    action
        Only "list".
    out
        Folder of all runs.
    """
    from services.cli.top import run_table

    if action != "list":
        raise ConfigError(f"runs {action!r}; the only action is list")
    print(run_table(out))


@app.command
def doctor(*, debug: Debug = False) -> int:
    """Say what this machine can do for D-VLA, and what is missing: torch, GPU, Vulkan, Redis, shared memory."""
    from services.cli.doctor import examine

    return examine()
