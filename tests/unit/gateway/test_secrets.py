"""Secrets: written by clients, readable by functions only."""

import base64
import logging
from pathlib import Path

import pytest
from tests.unit.gateway.conftest import Gateway, is_platform_error

from gpufaas_adapters.files.secrets import SecretFiles
from gpufaas_core.errors import StorageFailed
from gpufaas_core.model import FunctionId
from gpufaas_gateway.spec import Namespace

VALUE = "hunter2-\u00fc"
R1, R2 = FunctionId("echo.openfaas-fn@r1"), FunctionId("echo.openfaas-fn@r2")


def raw(value: bytes) -> str:
    return base64.b64encode(value).decode()


# --- the routes ---


@pytest.mark.parametrize(
    ("fields", "stored"),
    [
        ({"value": VALUE}, VALUE.encode()),
        ({"value": " padded\n"}, b" padded\n"),
        ({"rawValue": raw(b"\x00\xff\n")}, b"\x00\xff\n"),
        ({"value": "trimmed", "rawValue": raw(b"trimmed\n")}, b"trimmed"),
        ({"value": "", "rawValue": raw(b"raw")}, b"raw"),
        ({"value": None, "rawValue": raw(b"raw")}, b"raw"),
    ],
)
async def test_value_counts_unless_it_is_empty(gateway: Gateway, fields: dict[str, object], stored: bytes) -> None:
    await gateway.client.post("/system/secrets", json={"name": "key", **fields})

    assert gateway.secrets.values == {("openfaas-fn", "key"): stored}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"value": "x"}, "name is missing"),
        ({"name": "", "value": "x"}, "name is missing"),
        ({"name": "Key", "value": "x"}, "'Key' is not a secret's name"),
        ({"name": "../../etc/passwd", "value": "x"}, "is not a secret's name"),
        ({"name": ".hidden", "value": "x"}, "is not a secret's name"),
        ({"name": "a..b", "value": "x"}, "is not a secret's name"),
        ({"name": "a" * 254, "value": "x"}, "is not a secret's name"),
        ({"name": "a\0b", "value": "x"}, "is not a secret's name"),
        ({"name": "key"}, "value is missing"),
        ({"name": "key", "value": ""}, "value is missing"),
        ({"name": "key", "value": 5}, "value: input should be a valid string"),
        ({"name": "key", "rawValue": "hunter2!"}, "rawValue: it is not base64"),
        ({"name": "key", "rawValue": "hünter2"}, "rawValue: it is not base64"),
        ({"name": "key", "value": "x", "namespace": "none"}, "'none' does not exist"),
        ({"name": "key", "value": "x", "namespace": "../x"}, "'../x' does not exist"),
    ],
)
async def test_a_malformed_secret_is_400_and_says_where(
    gateway: Gateway, body: dict[str, object], message: str
) -> None:
    answer = await gateway.client.post("/system/secrets", json=body)

    assert (answer.status_code, message in answer.text) == (400, True), answer.text
    assert is_platform_error(answer)
    assert "hunter2" not in answer.text
    assert gateway.secrets.values == {}


@pytest.mark.parametrize("name", ["a", "api-key", "api.key", "0", "a" * 63 + ".b"])
async def test_names_are_dns_subdomains(gateway: Gateway, name: str) -> None:
    answer = await gateway.client.post("/system/secrets", json={"name": name, "value": "x"})

    assert answer.status_code == 201


async def test_secrets_belong_to_a_namespace(gateway: Gateway) -> None:
    await gateway.deployer.namespaces.create(Namespace("dev"))
    await gateway.client.post("/system/secrets", json={"name": "key", "value": "a"})
    await gateway.client.post("/system/secrets", json={"name": "key", "value": "b", "namespace": "dev"})
    await gateway.client.put("/system/secrets?namespace=dev", json={"name": "key", "value": "c"})

    listed = await gateway.client.get("/system/secrets?namespace=dev")
    nowhere = await gateway.client.get("/system/secrets?namespace=../dev")

    assert gateway.secrets.values == {("openfaas-fn", "key"): b"a", ("dev", "key"): b"c"}
    assert listed.json() == [{"name": "key", "namespace": "dev"}]
    assert nowhere.json() == []


async def test_values_are_nowhere_but_in_the_store(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        answers = [
            await gateway.client.post("/system/secrets", json={"name": "key", "value": VALUE}),
            await gateway.client.put("/system/secrets", json={"name": "key", "value": VALUE}),
            await gateway.client.post("/system/secrets", json={"name": "key", "value": VALUE}),
            await gateway.client.post("/system/secrets", content=f'{{"name": 1, "value": "{VALUE}"}}'.encode()),
            await gateway.client.post("/system/secrets", content=f'{{"value": "{VALUE}"'.encode()),
            await gateway.client.get("/system/secrets"),
        ]
        function = await gateway.deployed(secrets=["key"])
        answers += [await gateway.client.get("/system/functions"), await gateway.client.get("/system/status")]

    assert all("hunter2" not in answer.text for answer in answers)
    assert "hunter2" not in caplog.text
    assert "hunter2" not in repr((gateway.workers.defined[function], gateway.store.all()))


# --- functions with secrets ---


async def test_a_function_names_the_secrets_that_it_wants(gateway: Gateway) -> None:
    await gateway.client.post("/system/secrets", json={"name": "key", "value": VALUE})

    function = await gateway.deployed(secrets=["key"])

    assert gateway.workers.defined[function].secrets == ("key",)
    assert (await gateway.client.get("/system/function/echo")).json()["secrets"] == ["key"]


async def test_a_deployment_with_an_unknown_secret_is_400_and_names_it(gateway: Gateway) -> None:
    await gateway.deployer.namespaces.create(Namespace("dev"))
    await gateway.client.post("/system/secrets", json={"name": "here", "value": "x"})
    await gateway.client.post("/system/secrets", json={"name": "there", "value": "x", "namespace": "dev"})

    answer = await gateway.client.post("/system/functions", json=gateway.body(secrets=["here", "there"]))

    assert answer.status_code == 400
    assert "secrets: 'there' does not exist in openfaas-fn" in answer.text
    assert gateway.catalogue.everywhere() == []


# --- the files ---


@pytest.fixture
def files(tmp_path: Path) -> SecretFiles:
    return SecretFiles(tmp_path / "secrets", tmp_path / "mounts")


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_values_lie_where_only_their_owner_reads(tmp_path: Path, files: SecretFiles) -> None:
    files.create("dev", "key", b"value\n")

    assert (tmp_path / "secrets" / "dev" / "key").read_bytes() == b"value\n"
    assert mode_of(tmp_path / "secrets" / "dev" / "key") == 0o600
    assert (
        mode_of(tmp_path / "secrets" / "dev") == mode_of(tmp_path / "secrets") == mode_of(tmp_path / "mounts") == 0o700
    )


def test_a_function_sees_its_secrets_and_no_others(files: SecretFiles) -> None:
    for name in ("mine", "other"):
        files.create("openfaas-fn", name, name.encode())

    directory = files.mount(R1, "openfaas-fn", ["mine"])

    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {"mine": b"mine"}
    assert (mode_of(directory / "mine"), mode_of(directory)) == (0o600, 0o700)


def test_a_container_may_have_any_user(files: SecretFiles) -> None:
    files.create("openfaas-fn", "key", b"a")

    directory = files.mount(R1, "openfaas-fn", ["key"], for_container=True)
    files.update("openfaas-fn", "key", b"b")

    assert (directory / "key").read_bytes() == b"b"
    assert (mode_of(directory / "key"), mode_of(directory)) == (0o444, 0o755)
    assert mode_of(directory.parent) == 0o700


def test_running_functions_see_updates_and_removals(files: SecretFiles) -> None:
    files.create("openfaas-fn", "key", b"a")
    files.create("dev", "key", b"other")
    one, two = (files.mount(each, "openfaas-fn", ["key"]) for each in (R1, R2))

    files.update("openfaas-fn", "key", b"b")
    assert [(each / "key").read_bytes() for each in (one, two)] == [b"b", b"b"]

    files.remove("openfaas-fn", "key")
    assert not (one / "key").exists()
    assert files.names("dev") == ["key"]


def test_a_reader_keeps_the_file_that_it_opened(files: SecretFiles) -> None:
    """Renamed into place: no reader sees half of a value."""
    files.create("openfaas-fn", "key", b"a" * 100)
    directory = files.mount(R1, "openfaas-fn", ["key"])

    with (directory / "key").open("rb") as reader:
        files.update("openfaas-fn", "key", b"b")

        assert reader.read() == b"a" * 100


def test_a_worker_that_starts_after_its_secret_was_removed_starts_without_it(files: SecretFiles) -> None:
    files.create("openfaas-fn", "key", b"a")
    files.mount(R1, "openfaas-fn", ["key"])
    files.remove("openfaas-fn", "key")

    directory = files.mount(R1, "openfaas-fn", ["key"])

    assert list(directory.iterdir()) == []


def test_mounts_go_with_their_function(tmp_path: Path, files: SecretFiles) -> None:
    files.create("openfaas-fn", "key", b"a")
    files.mount(R1, "openfaas-fn", ["key"])
    kept = files.mount(R2, "openfaas-fn", ["key"])

    files.unmount(R1)
    files.unmount(FunctionId("never.openfaas-fn@r1"))
    files.update("openfaas-fn", "key", b"b")

    assert list((tmp_path / "mounts").iterdir()) == [kept]


def test_files_are_kept_as_another_place_has_them(tmp_path: Path, files: SecretFiles) -> None:
    files.put("a", "key", b"1")
    files.put("a", "key", b"2")
    files.put("b", "gone", b"3")

    files.keep_only({("a", "key"), ("c", "unknown")})

    assert (files.names("a"), files.names("b")) == (["key"], [])
    assert (tmp_path / "secrets" / "a" / "key").read_bytes() == b"2"


def test_what_a_killed_platform_left_is_removed(tmp_path: Path, files: SecretFiles) -> None:
    files.create("openfaas-fn", "key", b"a")
    files.mount(R1, "openfaas-fn", ["key"])
    (tmp_path / "secrets" / "openfaas-fn" / ".new-other").write_bytes(b"half")

    again = SecretFiles(tmp_path / "secrets", tmp_path / "mounts")

    assert again.names("openfaas-fn") == ["key"]
    assert list((tmp_path / "mounts").iterdir()) == []
    assert [path.name for path in (tmp_path / "secrets" / "openfaas-fn").iterdir()] == ["key"]


def test_a_disk_that_cannot_be_written_is_said_without_the_value(tmp_path: Path, files: SecretFiles) -> None:
    (tmp_path / "secrets" / "dev").write_text("in the way")

    with pytest.raises(StorageFailed, match="make the data directory writable") as raised:
        files.create("dev", "key", b"hunter2")

    assert "hunter2" not in str(raised.value)
