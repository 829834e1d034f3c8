"""
The operations of a gateway: one generator each (see `gateway`), from which `Client` and `AsyncClient` have their
methods of the same names, without the first parameter. All raise the errors of `Gateway.check`.
"""

import base64
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

from gpufaas.answer import Answer
from gpufaas.call_request import Pairs, as_pairs, call_request, function_path
from gpufaas.errors import GpufaasError, NotEnded, Refused, UnknownCall, UnknownFunction
from gpufaas.gateway import ENDLESS, ApiRequest, Gateway, Steps, given
from gpufaas.resources import (
    CallStatus,
    Environment,
    Explanation,
    Function,
    Info,
    Namespace,
    Node,
    Outcome,
    Quota,
    Secret,
    Status,
)
from gpufaas_core._types import Seconds

_CHUNK: Final = 1 << 20
_FUNCTIONS_ONLY: Final = {"openfaas": "1"}
"""Marks a namespace of functions in OpenFaaS: every client sends it, so that every gateway sees it."""
_ENDED: Final = ("done", "dead", "cancelled")
_FIRST_PAUSE_S: Final[Seconds] = 0.05
_LAST_PAUSE_S: Final[Seconds] = 2.0

# --- functions ---


def functions(at: Gateway, namespace: str | None = None) -> Steps[list[Function]]:
    """Return the functions of a namespace; of openfaas-fn if none is named."""
    return at.objects("/system/functions", namespace=namespace)


def function(at: Gateway, name: str, namespace: str | None = None, *, usage: bool = True) -> Steps[Function]:
    """
    Return all about one function.

    :param usage: also measure the CPU and memory that its workers use now
    :raises UnknownFunction: it is not deployed
    """
    path = f"/system/function/{_quoted(name)}"
    return at.object(path, UnknownFunction, namespace=namespace, usage="1" if usage else None)


def deploy(
    at: Gateway, deployment: Mapping[str, object], *, update: bool = True, replace: bool = False
) -> Steps[Outcome]:
    """
    Update the function, or create it if it is not deployed.

    :param deployment: a `Deployment`
    :param update: False: only create it, which is refused (409) if it is deployed
    :param replace: remove it first, then create it
    """
    if replace:
        yield from remove(at, str(deployment["service"]), str(deployment.get("namespace") or "") or None)
    request = ApiRequest("PUT", "/system/functions", json=deployment, timeout_s=at.deploy_s)
    if update and not replace:
        try:
            return _outcome((yield from at.ask(request, UnknownFunction)))
        except UnknownFunction:
            pass
    return _outcome((yield from at.ask(ApiRequest("POST", request.path, json=deployment, timeout_s=at.deploy_s))))


def remove(at: Gateway, name: str, namespace: str | None = None) -> Steps[bool]:
    """Remove a function; return False if it was not deployed."""
    body = {"functionName": name, **given(namespace=namespace)}
    try:
        yield from at.ask(ApiRequest("DELETE", "/system/functions", json=body), UnknownFunction)
    except UnknownFunction:
        return False
    return True


def scale(at: Gateway, name: str, replicas: int, namespace: str | None = None) -> Steps[None]:
    """Set the number of copies of a function, within its bounds."""
    body = {"serviceName": name, "replicas": replicas, **given(namespace=namespace)}
    yield from at.ask(ApiRequest("POST", f"/system/scale-function/{_quoted(name)}", json=body), UnknownFunction)


def history(at: Gateway, name: str, namespace: str | None = None) -> Steps[list[dict[str, Any]]]:
    """Return the last deployments of a function, newest first; docs/openfaas.md has their fields."""
    return at.objects(f"/system/function/{_quoted(name)}/revisions", UnknownFunction, namespace=namespace)


def rollback(at: Gateway, name: str, to: str | None = None, namespace: str | None = None) -> Steps[dict[str, Any]]:
    """
    Deploy the revision *to* anew, else the last that has served before; return it as ``to``, and as ``revision`` the
    one that takes the calls now, or once it is loaded.

    :raises Refused: there is no such revision (404), or its files were removed, or there is no earlier one (409)
    """
    path, body = f"/system/function/{_quoted(name)}/rollback", given(revision=to)
    request = ApiRequest("POST", path, given(namespace=namespace), json=body, timeout_s=at.deploy_s)
    found: dict[str, Any] = yield from at.json(request, Refused)
    return found


def environments(at: Gateway, deployment: Mapping[str, object] | None = None) -> Steps[list[Environment] | None]:
    """
    Return the Python environments of the nodes on which *deployment* may run, or of all nodes; None: the gateway does
    not say.

    :raises Refused: no device meets its constraints
    """
    try:
        found = yield from at.json(
            ApiRequest("GET" if deployment is None else "POST", "/system/environments", json=deployment), Refused
        )
    except Refused as exc:
        if exc.status in (404, 405):
            return None
        raise
    if not isinstance(found, list):
        raise at.is_none("/system/environments")
    return found


def logs(
    at: Gateway,
    name: str,
    namespace: str | None = None,
    *,
    follow: bool = False,
    tail: int | None = None,
    since: datetime | None = None,
    instance: str | None = None,
    call_id: str | None = None,
) -> Steps[httpx.Response]:
    """
    Give the lines that a function printed, and the errors of its deployments and loads.

    :param follow: go on with new lines, without end
    :param tail: the number of lines, the last ones
    :param since: with a time zone; only lines of that time or later
    :param instance: only this worker
    :param call_id: only the lines of this call
    :raises UnknownFunction: it is not deployed, and left no logs
    """
    params = {
        "name": name, "follow": "true" if follow else "false", "tail": str(tail or -1),
        **given(
            namespace=namespace,
            instance=instance,
            callId=call_id,
            since=since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ") if since else None,
        ),
    }  # fmt: skip
    # No limit when followed: a function may print nothing for days.
    request = ApiRequest("GET", "/system/logs", params, timeout_s=ENDLESS if follow else None, streams=True)
    return at.ask(request, UnknownFunction, waits=False)


# --- calls ---


def invoke(
    at: Gateway,
    name: str,
    body: object = None,
    *,
    namespace: str | None = None,
    method: str = "POST",
    query: Pairs = (),
    headers: Pairs = (),
    timeout_s: Seconds = ENDLESS,
) -> Steps[Answer]:
    """
    Call a function, and return its answer, of any status.

    :param name: ``NAME``, or ``NAME/path``
    :param body: bytes, text, an iterator of bytes, or a JSON value; a Content-Type in *headers* goes before ours
    :param timeout_s: longest time between two pieces of the answer; by default only the function's own limit holds
    :raises UnknownFunction, Refused: the gateway answers, and not the function
    :raises BrokeOff: the answer broke off in the middle
    """
    request = call_request(function_path(name, namespace), body, method, query, headers, timeout_s)
    return Answer((yield from _answered(at, request)))


def stream(
    at: Gateway,
    name: str,
    body: object = None,
    *,
    namespace: str | None = None,
    method: str = "POST",
    query: Pairs = (),
    headers: Pairs = (),
    timeout_s: Seconds = ENDLESS,
    later: bool = False,
    check: bool = True,
) -> Steps[httpx.Response]:
    """
    Call a function, and give its answer as it comes. Other parameters are those of `invoke`.

    :param later: call it asynchronously: the answer is the gateway's
    :param check: False: an answer of the gateway instead of the function is given, and not raised
    """
    request = call_request(function_path(name, namespace, later), body, method, query, headers, timeout_s, streams=True)
    if check:
        return (yield from _answered(at, request))
    return (yield request)


def invoke_later(
    at: Gateway,
    name: str,
    body: object = None,
    *,
    namespace: str | None = None,
    callback_url: str | None = None,
    query: Pairs = (),
    headers: Pairs = (),
) -> Steps[str]:
    """
    Have a function called later, at least once, even if the platform is restarted meanwhile.

    :param callback_url: the answer of the function is posted there, and kept nowhere else
    """
    headers = [*as_pairs(headers), *given(**{"X-Callback-Url": callback_url}).items()]
    request = call_request(function_path(name, namespace, asynchronous=True), body, "POST", query, headers, None)
    answer = yield from _answered(at, request)
    return str(answer.headers.get("X-Call-Id", ""))


def call(at: Gateway, call_id: str) -> Steps[CallStatus]:
    """
    Return the state of an asynchronous call.

    :raises UnknownCall: it was never accepted, or ended over an hour ago
    """
    return at.object(f"/async/{_quoted(call_id)}", UnknownCall)


def wait_for_call(at: Gateway, call_id: str, timeout_s: Seconds = ENDLESS) -> Steps[CallStatus]:
    """
    Wait until an asynchronous call has ended, and return its state. It is looked up after 50 ms, then less and less
    often, down to every two seconds.

    :raises NotEnded: it did not end within *timeout_s*
    :raises UnknownCall: it was never accepted, or ended over an hour ago
    """
    pause_s, waited_s = 0.0, 0.0
    while True:
        request = ApiRequest("GET", f"/async/{_quoted(call_id)}", after_s=pause_s)
        found: CallStatus = yield from at.json(request, UnknownCall)
        if found["state"] in _ENDED:
            return found
        if waited_s >= timeout_s:
            raise NotEnded(f"call {call_id} of {found['function']} is {found['state']} after {timeout_s:g} s: wait on")
        pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LAST_PAUSE_S, timeout_s - waited_s)
        waited_s += pause_s


def cancel_call(at: Gateway, call_id: str) -> Steps[None]:
    """
    Cancel an asynchronous call: one that waits is never executed, one that runs is aborted.

    :raises UnknownCall: it was never accepted, or ended over an hour ago
    :raises Refused: it has ended (409)
    """
    yield from at.ask(ApiRequest("DELETE", f"/async-function/{_quoted(call_id)}"), UnknownCall)


def dead_calls(at: Gateway) -> Steps[list[CallStatus]]:
    """Return the asynchronous calls whose last attempt has failed, the oldest first."""
    return at.objects("/system/async/dead")


def retry_call(at: Gateway, call_id: str) -> Steps[None]:
    """Queue a dead call again. :raises UnknownCall: it is not dead"""
    yield from at.ask(ApiRequest("POST", f"/system/async/dead/{_quoted(call_id)}/retry"), UnknownCall)


def explain(at: Gateway, call_id: str) -> Steps[Explanation]:
    """
    Return why a call of a model function was started where and when it was, or why it still waits.

    :raises UnknownCall: it is not among the last ones
    """
    return at.object(f"/system/explain/{_quoted(call_id)}", UnknownCall)


# --- the platform ---


def info(at: Gateway) -> Steps[Info]:
    """Return the version and the provider of the gateway."""
    return at.object("/system/info")


def status(at: Gateway) -> Steps[Status]:
    """Return the devices, the copies that are resident on them, and the calls that wait and run."""
    return at.object("/system/status")


def is_ready(at: Gateway) -> Steps[bool]:
    """Return whether the gateway and its services are healthy; also False if no gateway answers."""
    try:
        yield from at.ask(ApiRequest("GET", "/healthz"), Refused, waits=False)
    except GpufaasError:
        return False
    return True


def prune(at: Gateway, *, dry: bool = False) -> Steps[dict[str, int]]:
    """
    Remove what the gateway keeps and no function names; return how many ``artifacts``, and their ``size`` in bytes.

    :param dry: only say what would go
    """
    return at.json(ApiRequest("POST", "/system/prune", {"dry": "1"} if dry else {}, timeout_s=at.deploy_s), Refused)


def nodes(at: Gateway) -> Steps[list[Node]]:
    """Return the nodes of a cluster."""
    return at.objects("/system/nodes")


def cost(at: Gateway, since_s: float = 86400.0, by: str = "function") -> Steps[list[dict[str, Any]]]:
    """
    Return what was paid for nodes that were ordered in the last *since_s* seconds, the dearest first.

    :param by: ``function``, ``namespace`` or ``offer``
    :raises Refused: this platform orders none
    """
    return at.objects("/system/cost", Refused, since=str(since_s), by=by)


def node(at: Gateway, name: str) -> Steps[Node]:
    return at.object(f"/system/nodes/{_quoted(name)}", Refused)


def drain_node(at: Gateway, name: str, drain: bool = True) -> Steps[None]:
    """Give a node no new calls; with *drain* False, give it calls again."""
    yield from at.ask(ApiRequest("POST" if drain else "DELETE", f"/system/nodes/{_quoted(name)}/drain"), Refused)


# --- profiles ---


def take_profile(
    at: Gateway, /, name: str, namespace: str | None = None, *, body: bytes = b"", content_type: str = "", **how: object
) -> Steps[dict[str, Any]]:
    """
    Measure batches of a function on a device, and return what was measured (docs/openfaas.md has the fields).

    :param body: the input; empty: the sample of its bundle
    :param how: ``device``, ``batches`` (``1,2,4``), ``together``, ``quick``; without one, as the platform chooses
    :raises Refused: it cannot be measured, or did not run; then nothing is kept
    """
    params = given(namespace=namespace, **{key: str(value) for key, value in how.items() if value})
    headers = [("Content-Type", content_type)] if content_type else []
    path = f"/system/profile/{_quoted(name)}"
    return at.json(ApiRequest("POST", path, params, headers, content=body, timeout_s=ENDLESS), UnknownFunction)


def profiles(at: Gateway, name: str, namespace: str | None = None) -> Steps[dict[str, Any]]:
    """Return what was taken of a function, by kind of device. :raises Refused: nothing was"""
    return at.object(f"/system/profile/{_quoted(name)}", Refused, namespace=namespace)


def put_profiles(
    at: Gateway, name: str, content: Mapping[str, object], namespace: str | None = None
) -> Steps[dict[str, Any]]:
    """Take over *content*, which `profiles` returned elsewhere. :raises Refused: it cannot be"""
    path = f"/system/profile/{_quoted(name)}"
    return at.json(ApiRequest("PUT", path, given(namespace=namespace), json=content), UnknownFunction)


# --- secrets and namespaces ---


def secrets(at: Gateway, namespace: str | None = None) -> Steps[list[Secret]]:
    """Return the names of secrets."""
    return at.objects("/system/secrets", namespace=namespace)


def put_secret(
    at: Gateway,
    name: str,
    value: str | bytes,
    namespace: str | None = None,
    *,
    update: bool = False,
    raw: bytes | None = None,
) -> Steps[Outcome]:
    """
    Create a secret, or with *update* change its value. To create one that exists is refused (409), and to update one
    that does not (404).

    :param raw: the untrimmed value, which faas-cli sends as well; gateways do not use it
    """
    raw = value if isinstance(value, bytes) else raw
    text = value if isinstance(value, str) else None
    body = given(name=name, namespace=namespace, value=text, rawValue=base64.b64encode(raw).decode() if raw else None)
    return _outcome((yield from at.ask(ApiRequest("PUT" if update else "POST", "/system/secrets", json=body), Refused)))


def remove_secret(at: Gateway, name: str, namespace: str | None = None) -> Steps[None]:
    yield from at.ask(ApiRequest("DELETE", "/system/secrets", json=given(name=name, namespace=namespace)), Refused)


def namespaces(at: Gateway) -> Steps[list[str]]:
    return at.objects("/system/namespaces", each=str)


def namespace(at: Gateway, name: str) -> Steps[Namespace]:
    return at.object(_namespace_path(name), Refused)


def put_namespace(
    at: Gateway,
    name: str,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    *,
    update: bool = False,
) -> Steps[None]:
    """Create a namespace; with *update*, replace its labels and annotations."""
    body = {
        "name": name,
        "annotations": _FUNCTIONS_ONLY | dict(annotations or {}),
        "labels": _FUNCTIONS_ONLY | dict(labels or {}),
    }
    path = _namespace_path(name if update else "")
    yield from at.ask(ApiRequest("PUT" if update else "POST", path, json=body), Refused)


def remove_namespace(at: Gateway, name: str) -> Steps[None]:
    """:raises Refused: it has functions (409), or does not exist (404)"""
    body = {"name": name, "labels": _FUNCTIONS_ONLY}
    yield from at.ask(ApiRequest("DELETE", _namespace_path(name), json=body), Refused)


def quota(at: Gateway, namespace: str) -> Steps[Quota]:
    """Return the limits of a namespace, and what it uses."""
    return at.object(f"{_namespace_path(namespace)}/quota", Refused)


def put_quota(at: Gateway, namespace: str, limits: Quota) -> Steps[None]:
    """Replace the limits of a namespace."""
    yield from at.ask(ApiRequest("PUT", f"{_namespace_path(namespace)}/quota", json=limits), Refused)


def remove_quota(at: Gateway, namespace: str) -> Steps[None]:
    yield from at.ask(ApiRequest("DELETE", f"{_namespace_path(namespace)}/quota"), Refused)


# --- artifacts ---


def has_artifact(at: Gateway, sha256: str) -> Steps[bool]:
    """Return whether the gateway has the file of this digest."""
    try:
        yield from at.ask(ApiRequest("HEAD", f"/system/artifacts/{sha256}"), Refused)
    except Refused as exc:
        if exc.status == 404:
            return False
        raise
    return True


def put_artifact(
    at: Gateway, sha256: str, path: Path, progress: Callable[[int], object] = lambda _: None
) -> Steps[None]:
    """Upload the file *path*, whose digest is *sha256*; *progress* gets the bytes of each step."""
    try:
        size = path.stat().st_size
    except OSError as exc:
        raise GpufaasError(f"{path}: {exc.strerror}: build the function again") from exc
    headers = (("Content-Length", str(size)), ("Content-Type", "application/octet-stream"))
    request = ApiRequest(
        "PUT",
        f"/system/artifacts/{sha256}",
        headers=headers,
        content=_chunks(path, progress),
        timeout_s=at.deploy_s,  # of each step, not of the whole
    )
    try:
        yield from at.ask(request, Refused)
    except Refused as exc:
        if exc.status not in (404, 405):
            raise
        text = f"the gateway at {at.shown} takes no bundles: is it gpufaas, and of this version or later?"
        raise Refused(exc.status, text) from exc


# --- how ---


def _answered(at: Gateway, request: ApiRequest) -> Steps[httpx.Response]:
    answer = yield request
    if at.is_refusal(answer, request.of_function):
        at.check(answer, UnknownFunction, request.path)
    return answer


def _outcome(answer: httpx.Response) -> Outcome:
    return Outcome(answer.status_code, answer.reason_phrase, answer.headers.get("X-Gpufaas-Revision", ""))


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _namespace_path(name: str) -> str:
    return f"/system/namespace/{_quoted(name)}"


def _chunks(path: Path, progress: Callable[[int], object]) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
            progress(len(chunk))
