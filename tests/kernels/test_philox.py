"""Philox against the known answers that its authors published (Random123, kat_vectors)."""

from __future__ import annotations

import random

import torch

from kvern.kernels.philox import philox4x32, reference, uniform53

Words = tuple[int, ...]

KNOWN_ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_of(cases: list[tuple[Words, Words]]) -> list[Words]:
    key = tuple(torch.tensor(words) for words in zip(*(key for key, _ in cases), strict=True))
    counter = tuple(torch.tensor(words) for words in zip(*(counter for _, counter in cases), strict=True))
    words = philox4x32(key, counter)  # type: ignore[arg-type]
    return list(zip(*(word.tolist() for word in words), strict=True))


def test_philox_of_published_keys_and_counters_gives_the_published_words() -> None:
    assert philox_of([(key, counter) for key, counter, _ in KNOWN_ANSWERS]) == [
        answer for _, _, answer in KNOWN_ANSWERS
    ]


def test_reference_of_published_keys_and_counters_gives_the_published_words() -> None:
    for key, counter, answer in KNOWN_ANSWERS:
        assert reference.philox4x32(key, counter) == answer  # type: ignore[arg-type]


def test_philox_of_random_keys_and_counters_equals_reference() -> None:
    source = random.Random(0)
    cases = [
        (tuple(source.getrandbits(32) for _ in range(2)), tuple(source.getrandbits(32) for _ in range(4)))
        for _ in range(200)
    ]
    assert philox_of(cases) == [reference.philox4x32(key, counter) for key, counter in cases]  # type: ignore[arg-type]


def test_uniform53_at_its_ends_is_zero_and_just_below_one() -> None:
    ends = uniform53(torch.tensor([0, 2**32 - 1, 0]), torch.tensor([2**11 - 1, 2**32 - 1, 2**11]))
    assert ends.tolist() == [0.0, 1.0 - 2.0**-53, 2.0**-53]
