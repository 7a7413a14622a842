"""gRPC interceptors: domain errors to status codes on the server, bearer tokens on both sides."""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog

from services.common import errors

log = structlog.get_logger()

CODES: dict[type[errors.DvlaError], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Superseded: grpc.StatusCode.ABORTED,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Unsupported: grpc.StatusCode.FAILED_PRECONDITION,
}
ERRORS = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidInput,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidInput,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ABORTED: errors.Superseded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Exhausted,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unavailable,
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Unsupported,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
}
TOKEN_HEADER = "authorization"
DETAILS_LIMIT = 800
"""Characters of an error that travel: a status lies in the trailers, and peers refuse trailers above 8 KiB."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns a raised `DvlaError` into its status code; anything else is logged and becomes INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler, whichever of the four kinds it is."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        guard = _guard_stream if handler.response_streaming else _guard_unary
        return _rewritten(handler, lambda behaviour: guard(behaviour, handler_call_details.method))


def _rewritten(handler: Any, change: Callable[[Any], Any]) -> Any:
    """A handler of the same kind with another behaviour."""
    request, response = ("stream" if s else "unary" for s in (handler.request_streaming, handler.response_streaming))
    kind = f"{request}_{response}"
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(change(getattr(handler, kind)), handler.request_deserializer, handler.response_serializer)


def _guard_unary(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:  # noqa: BLE001 - every path aborts the call with a status
            await _abort(error, method, context)

    return guarded


def _guard_stream(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            replies = behaviour(request, context)
            if not hasattr(replies, "__aiter__"):  # a coroutine that calls context.write, such as health's Watch
                await replies
                return
            async with aclosing(replies):  # cleans up now, not when the garbage collector comes by
                async for reply in replies:
                    yield reply
        except Exception as error:  # noqa: BLE001 - every path aborts the call with a status
            await _abort(error, method, context)

    return guarded


async def _abort(error: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    for kind, code in CODES.items():
        if isinstance(error, kind):
            await context.abort(code, str(error)[:DETAILS_LIMIT])
    log.error("call failed", method=method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:DETAILS_LIMIT])


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call, health included, whose bearer token is not ours."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Compare in constant time."""
        given = next((v for k, v in handler_call_details.invocation_metadata or () if k == TOKEN_HEADER), "")
        raw = given if isinstance(given, bytes) else given.encode()
        handler = await continuation(handler_call_details)
        if handler is None or hmac.compare_digest(raw, self._expected):
            return handler
        return _rewritten(handler, lambda _: _refuse)


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing bearer token; give --token-file")


def _with_token(details: Any, header: tuple[str, str]) -> Any:
    metadata = list(details.metadata or ())
    metadata.append(header)
    fields = {name: getattr(details, name, None) for name in ("method", "timeout", "credentials", "wait_for_ready")} | {
        "metadata": metadata
    }
    return _SyncDetails(**fields)


class _SyncDetails(grpc.ClientCallDetails):
    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)
        self.compression = None


class SyncToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the bearer token to every call of a synchronous channel."""

    def __init__(self, token: str) -> None:
        self._header = (TOKEN_HEADER, f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Add the token."""
        return continuation(_with_token(client_call_details, self._header), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Add the token."""
        return continuation(_with_token(client_call_details, self._header), request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Add the token."""
        return continuation(_with_token(client_call_details, self._header), request_iterator)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Add the token."""
        return continuation(_with_token(client_call_details, self._header), request_iterator)


def async_token(token: str) -> Sequence[grpc.aio.ClientInterceptor]:
    """Interceptors that add the bearer token to every call of an asyncio channel, one per kind of call."""
    header = (TOKEN_HEADER, f"Bearer {token}")

    async def add(_: Any, continuation: Any, client_call_details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(client_call_details.metadata or ()), header)
        return await continuation(client_call_details._replace(metadata=metadata), request)

    kinds = (
        (grpc.aio.UnaryUnaryClientInterceptor, "intercept_unary_unary"),
        (grpc.aio.UnaryStreamClientInterceptor, "intercept_unary_stream"),
        (grpc.aio.StreamUnaryClientInterceptor, "intercept_stream_unary"),
        (grpc.aio.StreamStreamClientInterceptor, "intercept_stream_stream"),
    )
    return [type("AsyncToken", (base,), {method: add})() for base, method in kinds]


def replace_handlers(server: grpc.aio.Server, service: str, handlers: dict[str, Any]) -> None:
    """Serve some methods by handlers with serialisers of their own, in place of the generated ones added before.

    Both ways in which generated code adds handlers are covered; a registered one wins over a generic one.
    """
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_registered_method_handlers(service, handlers)
