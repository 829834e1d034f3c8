"""
Processes for `test_fetch`: a peer that serves a directory of artifacts, and a node that fetches.

``python peer.py serve ROOT PORT [CUT]`` sends at most CUT bytes of each answer, then keeps the connection open and
says nothing. ``python peer.py fetch ROOT URL DIGEST`` fetches, and prints each progress; at last, by how many bytes
its memory has grown at most.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn

from gpufaas_cache_manager.artifacts import ArtifactStore
from gpufaas_cache_manager.bundles import BundleStore
from gpufaas_cache_manager.fetcher import Fetcher
from gpufaas_cache_manager.filling import FetchSettings
from gpufaas_cache_manager.peers import PeerArtifacts, PeerClient

TOKEN = "the cluster's token"


def counted(app: PeerArtifacts, cut: int | None) -> Callable[..., Awaitable[None]]:
    """
    `app`, with what it has sent so far at /sent, the bytes from which it was asked to send at /asked, and a limit on
    what it sends in an answer.
    """
    asked: list[str] = []

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        if scope["path"] in ("/sent", "/asked"):
            said = str(app.sent) if scope["path"] == "/sent" else " ".join(asked)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": said.encode()})
            return
        asked.append(dict(scope["headers"]).get(b"range", b"bytes=0-").decode()[6:-1])
        left = cut

        async def limited(message: Any) -> None:
            nonlocal left
            body = message.get("body", b"")
            if left is not None and body and len(body) > left:
                if left:
                    await send({**message, "body": body[:left], "more_body": True})
                left = 0
                await asyncio.Event().wait()
            if left is not None:
                left -= len(body)
            await send(message)

        await app(scope, receive, limited)

    return serve


def peak() -> int:
    """Return the most memory that this process has had, by the kernel's count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


async def fetch(root: Path, url: str, digest: str) -> None:
    artifacts = ArtifactStore(root / "artifacts")

    async def holders(_: str) -> list[str]:
        return [url]

    client, patient = PeerClient(TOKEN, patience_s=60.0), FetchSettings(patience_s=60.0)
    fetcher = Fetcher(artifacts, BundleStore(root / "bundles", artifacts), holders, client, settings=patient)
    before = peak()
    await fetcher.ensure(digest, progress=lambda done, size: print(done, size, flush=True))
    print(peak() - before, flush=True)


def main() -> None:
    what, root, *rest = sys.argv[1:]
    if what == "serve":
        app = PeerArtifacts(ArtifactStore(Path(root) / "artifacts"), TOKEN)
        cut = int(rest[1]) if len(rest) > 1 else None
        uvicorn.run(counted(app, cut), port=int(rest[0]), log_level="error", lifespan="off", access_log=False)
    else:
        asyncio.run(fetch(Path(root), *rest))


if __name__ == "__main__":
    main()
