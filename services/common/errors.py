"""The error tree: what went wrong, in words, with the remedy.

Domain code raises these; the server interceptor maps them to gRPC status codes and the client maps them
back, so both sides of a wire see the same class. The launcher maps them to exit codes.

    DvlaError
    ├── ConfigError          bad recipe, flag or combination          INVALID_ARGUMENT, exit 2
    ├── InvalidInput         bad data from a peer                     INVALID_ARGUMENT
    ├── NotFound             no such run, version, claim, task        NOT_FOUND
    ├── Superseded           an older epoch or attempt                ABORTED
    ├── Exhausted            no room now: slots, arena, Redis memory  RESOURCE_EXHAUSTED
    ├── Unavailable          a peer or dependency cannot be reached   UNAVAILABLE
    └── Unsupported          this build or machine cannot do it       FAILED_PRECONDITION
"""


class DvlaError(Exception):
    """Root of all errors that carry a message meant for a person."""

    exit_code = 1


class ConfigError(DvlaError):
    """A setting is impossible. The message names value, expectation and remedy."""

    exit_code = 2


class InvalidInput(DvlaError):
    """Data from a peer is malformed: wrong shape, dtype, range or not finite."""


class NotFound(DvlaError):
    """The named thing does not exist (any more)."""


class Superseded(DvlaError):
    """The caller acts for an older epoch or attempt; somebody newer took over."""


class Exhausted(DvlaError):
    """No room at the moment; the caller may retry later."""


class Unavailable(DvlaError):
    """A peer or dependency cannot be reached now."""


class Unsupported(DvlaError):
    """This build, machine or simulator cannot do what was asked."""

    exit_code = 2
