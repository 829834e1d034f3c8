from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def held_out(deployed: Any) -> tuple[list[Any], list[int]]:
    images, labels = split_of(deployed("digits"))[1]
    return images.tolist(), labels.tolist()


def split_of(digits: Any) -> Any:
    namespace: dict[str, Any] = {"__name__": "digits_cnn"}
    exec((digits.folder / "digits_cnn.py").read_text(), namespace)
    return namespace["split"]()


@pytest.mark.slow
def test_at_least_97_percent_of_held_out_images_are_right(deployed: Any, held_out: Any) -> None:
    images, labels = held_out

    status, answers = deployed("digits").call(images)

    assert status == 200
    assert len(labels) == 360
    assert sum(each["digit"] == label for each, label in zip(answers, labels, strict=True)) / len(labels) >= 0.97


def test_one_image_may_be_rows_or_flat_and_gives_one_answer(deployed: Any, held_out: Any) -> None:
    image, label = held_out[0][0], held_out[1][0]

    _, by_rows = deployed("digits").call(image)
    _, flat = deployed("digits").call([pixel for row in image for pixel in row])
    _, named = deployed("digits").call({"pixels": image})

    assert by_rows == flat == named
    assert by_rows["digit"] == label
    assert sum(by_rows["probabilities"]) == pytest.approx(1, abs=1e-4)


def test_calls_that_run_together_are_answered_as_each_alone(deployed: Any, held_out: Any) -> None:
    images = held_out[0]
    bodies = [images[0], {"pixels": images[1]}, b"no", images[2:5], [17] * 64, images[5]]

    together = deployed("digits").call_together(*bodies)

    for (status, answer), (alone_status, alone) in zip(together, map(deployed("digits").call, bodies), strict=True):
        assert status == alone_status
        for one, other in zip(answer, alone, strict=True) if isinstance(alone, list) else ((answer, alone),):
            assert one.get("digit") == other.get("digit")
            assert one.get("error") == other.get("error")
    assert [status for status, _ in together] == [200, 200, 400, 200, 400, 200]
    assert len(together[3][1]) == 3
    assert deployed("digits").call_together(b"no")[0][0] == 400


@pytest.mark.parametrize(
    "body",
    [b"", b"no", [], [1] * 63, [[1] * 8] * 7, [17] * 64, [-1] * 64, ["1"] * 64, {"image": []}, [[1], [1, 2]], 5, None,
     b"[" + b"NaN," * 63 + b"NaN]", [1e400] * 64, [10**400] * 64],
)  # fmt: skip
def test_what_is_no_image_is_refused_with_what_is_expected(deployed: Any, body: Any) -> None:
    status, answer = deployed("digits").call(body)

    assert status == 400
    assert "64 numbers from 0 to 16" in answer["error"]
