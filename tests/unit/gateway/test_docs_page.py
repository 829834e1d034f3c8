"""The page at /docs: the OpenAPI document for people, without external resources."""

import re

from tests.unit.gateway.conftest import Gateway

from gpufaas_gateway.docs_page import render
from gpufaas_gateway.openapi import describe


async def test_it_has_every_route_and_schema_and_nothing_comes_from_elsewhere(gateway: Gateway) -> None:
    described = describe(gateway.app)

    page = render(described)

    for path, item in described["paths"].items():
        for method in item.keys() & {"get", "post", "put", "delete"}:
            assert f'<span class="method">{method.upper()}</span><code>{path}</code>' in page
    linked = set(re.findall(r'href="#([^"]+)"', page))
    assert linked <= {name for name in described["components"]["schemas"] if f'<h3 id="{name}">' in page}
    assert "FunctionDeployment" in linked
    assert "0.1.0" in page
    assert not re.search(r"https?://|<script|<link|<img|@import", page)


async def test_what_it_shows_is_text(gateway: Gateway) -> None:
    described = describe(gateway.app)
    described["info"]["version"] = "<script>"

    assert "<script>" not in render(described)


async def test_it_is_served_to_who_has_the_password(gateway: Gateway) -> None:
    assert "<title>gpufaas: API</title>" in (await gateway.client.get("/docs")).text
