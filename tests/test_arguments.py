"""Numbers of the command line: plain digits within bounds, or an error that shows what was typed."""

from __future__ import annotations

import argparse

import pytest

from hotcold.runtime.arguments import count, fraction, whole


def test_what_is_taken() -> None:
    assert (whole("0"), whole("007"), count("1"), count("9" * 15)) == (0, 7, 1, 10**15 - 1)
    assert (fraction("0.5"), fraction(".25"), fraction("0.999")) == (0.5, 0.25, 0.999)


@pytest.mark.parametrize("text", ["", "-1", "+1", "1_000", " 1", "1 ", "1.0", "1e3", "٣", "9" * 16, "nan", "x"])
def test_what_is_no_whole_number(text: str) -> None:
    for parse in (whole, count):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number from"):
            parse(text)


def test_zero_is_no_count() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 to .*, got '0'"):
        count("0")


@pytest.mark.parametrize("text", ["", "0", "1", "0.0", "1.0", "-0.5", "1e-3", "nan", "inf", ".", "0,5", "٠.٥", "1_0"])
def test_what_is_no_fraction(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a number between 0 and 1"):
        fraction(text)
