"""What `dvla` without arguments prints. Plain text and no imports, because help must answer at once."""

COMMANDS = {
    "train": "Train a policy on this machine: starts all roles, shows them, reports at the end",
    "eval": "Measure a checkpoint or a run on held-out starts",
    "demos": "Write demonstrations with a scripted expert",
    "sft": "Clone demonstrations: the warm start",
    "record": "Record episodes of a running system as videos",
    "profile": "Measure what a recipe costs on this machine, part by part",
    "plan": "Find the best use of an inventory for a profile: environments, split, placement",
    "top": "Look at a running run",
    "report": "Write the report of a run again",
    "trace": "Write what the lanes of a run did when, for ui.perfetto.dev",
    "runs": "List runs",
    "doctor": "Say what this machine can do, and what is missing",
}
ROLE_COMMANDS = {
    "sim": "Serve a vectorised simulator (sim check ADDRESS tests one)",
    "rollout": "Sample episodes with the newest weights",
    "store": "Keep episodes: admission, groups, leases (store inspect RUN shows them)",
    "learner": "Train the policy and publish its weights",
    "weights": "Keep versions of the weights and hand them out",
}

STORE_COMMANDS = ("inspect", "dead")
"""What `dvla store` does besides serving."""


def overview() -> str:
    """The page."""
    width = max(map(len, [*COMMANDS, *ROLE_COMMANDS])) + 2
    commands = "\n".join(f"  {name.ljust(width)}{text}" for name, text in COMMANDS.items())
    roles = "\n".join(f"  {name.ljust(width)}{text}" for name, text in ROLE_COMMANDS.items())
    return f"""Usage: dvla COMMAND [ARGUMENTS]

Trains vision-language-action robot policies with reinforcement learning: simulation, inference, training and
distribution of weights run at the same time, each as a service of its own.

Start here:
  dvla train recipes/pushcube.toml

Commands:
{commands}

Roles (dvla train starts them all; start them yourself on several machines):
{roles}

dvla COMMAND --help explains a command. --debug shows stack traces. Documentation: docs/"""
