"""
Processes for `test_fetch`: a peer that serves a directory of artifacts, and a node that fetches.

``python peer.py serve ROOT PORT [CUT]`` sends at most CUT bytes of each answer, then keeps the connection open and
says nothing. ``python peer.py fetch ROOT URL DIGEST`` fetches, and prints each progress.
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
from gpufaas_cache_manager.peers import PeerArtifacts, PeerClient

TOKEN = "the cluster's token"


def counted(app: PeerArtifacts, cut: int | None) -> Callable[..., Awaitable[None]]:
    """`app`, with what it has sent so far at /sent, and a limit on what it sends in an answer."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        if scope["path"] == "/sent":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": str(app.sent).encode()})
            return
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


async def fetch(root: Path, url: str, digest: str) -> None:
    artifacts = ArtifactStore(root / "artifacts")

    async def holders(_: str) -> list[str]:
        return [url]

    fetcher = Fetcher(artifacts, BundleStore(root / "bundles", artifacts), holders, PeerClient(TOKEN))
    await fetcher.ensure(digest, progress=lambda done, size: print(done, size, flush=True))
    print("here", flush=True)


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
