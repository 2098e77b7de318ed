import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from perennial.common.utils.knobs import Search, between, choice, knob
from perennial.common.utils.suggestions import alike, unknown


def draws(search: Search, count: int = 2000) -> list[float]:
    generator = np.random.default_rng(0)
    return [search.draw(generator) for _ in range(count)]


def test_choice_takes_each_value_as_often() -> None:
    values = draws(choice(5, "ten", 20.0))
    assert {type(value) for value in values} == {int, str, float}
    assert all(abs(values.count(value) / 2000 - 1 / 3) < 0.05 for value in (5, "ten", 20.0))


def test_uniform_and_log_have_their_medians_in_the_middle() -> None:
    assert np.median(draws(between(1e-4, 1.0))) == pytest.approx(0.5, abs=0.05)
    assert math.log10(np.median(draws(between(1e-4, 1.0, log=True)))) == pytest.approx(-2, abs=0.2)


@given(st.integers(1, 50), st.integers(1, 50), st.booleans(), st.integers(0, 99))
def test_whole_ends_give_whole_numbers_within(low: int, more: int, log: bool, seed: int) -> None:
    value = between(low, low + more, log=log).draw(np.random.default_rng(seed))
    assert isinstance(value, int)
    assert low <= value <= low + more


@pytest.mark.parametrize("low", [0, -1.0])
def test_a_log_range_begins_above_0(low: float) -> None:
    with pytest.raises(ValueError, match=rf"between\({low}, 1, log=True\): low must be above 0; {low} has no log"):
        between(low, 1, log=True)


def test_a_search_range_reads_as_in_a_paper() -> None:
    assert [str(s) for s in (choice(5, 10), between(0, 1), between(1e-3, 0.3, log=True))] == [
        "{5, 10}", "[0, 1]", "[0.001, 0.3] log",
    ]  # fmt: skip


def test_a_knob_tells_everything_in_the_schema_and_keeps_its_bounds() -> None:
    class Settings(BaseModel):
        rate: float = knob(0.1, "step size", symbol="η", source="§4", search=choice(0.1, 0.2), gt=0, le=1)
        plain: int = knob(1, "nothing special")

    fields = Settings.model_json_schema()["properties"]
    assert fields["rate"] | {"title": ""} == {
        "type": "number", "title": "", "default": 0.1, "description": "step size", "symbol": "η", "source": "§4",
        "search": {"kind": "choice", "values": [0.1, 0.2]}, "exclusiveMinimum": 0, "maximum": 1,
    }  # fmt: skip
    assert "search" not in fields["plain"]
    extra = Settings.model_fields["rate"].json_schema_extra
    assert isinstance(extra, dict)
    assert Search(**extra["search"]) == choice(0.1, 0.2)  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        Settings(rate=0)


def test_unknown_name_is_answered_with_the_nearest() -> None:
    assert unknown("method", "fedvg", ["local", "fedavg"]) == (
        "unknown method 'fedvg'; did you mean 'fedavg'? (there are: fedavg, local)"
    )
    assert unknown("method", "xyz", []) == "unknown method 'xyz' (there are: none)"


def test_names_that_may_be_one_that_is_spelt_in_several_ways() -> None:
    names = ["Sick", "sick", " sick ", "SICK", "well", "1", "1.0", "01", "1_0", "10", "nan", "not  ill", "Not ill"]
    assert alike(names) == [(" sick ", "SICK", "Sick", "sick"), ("01", "1", "1.0"), ("Not ill", "not  ill")]
    assert alike(["12345678901234567890", "12345678901234567891", "a", "b", "", "-"]) == []
