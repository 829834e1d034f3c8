"""Opens the object store that a URL names: a directory, or anything that speaks S3."""

import os
from collections.abc import Mapping
from pathlib import Path

from gpufaas_adapters.files.object_store import DirectoryStore
from gpufaas_cache_manager.object_store import ObjectStore
from gpufaas_core.errors import InvalidSpec


def object_store(url: str, environ: Mapping[str, str] = os.environ) -> ObjectStore:
    """
    Return the store that *url* names; nothing is asked of it yet.

    :param environ: where S3's credentials and region are looked for, under the usual AWS_* names
    :raises InvalidSpec: no such kind of store, or something missing in *url*
    """
    scheme, _, rest = url.partition(":")
    if scheme == "dir":
        if not rest.startswith("/") or not rest.strip("/"):
            raise InvalidSpec(f"object store {url!r}: an absolute path is expected, as in dir:/mnt/share/gpufaas")
        return DirectoryStore(Path("/" + rest.strip("/")))
    if scheme == "s3":
        try:
            from gpufaas_adapters.s3 import s3_store
        except ModuleNotFoundError:
            raise InvalidSpec(f"object store {url!r} needs a package: pip install 'gpufaas[s3]'") from None
        return s3_store(url, environ)
    raise InvalidSpec(
        f"object store {url!r} is of no known kind: expected dir:/path, or s3://bucket/prefix?endpoint=http://host:9000"
    )
