"""The model of an all-reduce."""

import pytest
from lab.chapters import scaling
from lab.chapters.scaling import Link


def exchange(workers, nbytes):
    """Recursive doubling, played: (messages one after another, bytes that one process sends), until all have all terms."""
    heard, sent, distance = [{me} for me in range(workers)], 0, 1
    while any(len(own) < workers for own in heard):
        heard = [heard[me] | heard[me ^ distance] for me in range(workers)]
        sent, distance = sent + nbytes, 2 * distance
    return sent // nbytes, sent


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_short_messages_take_those_of_the_exchange_and_long_ones_the_fewest_bytes(workers):
    link = Link(1e-5, 1e9)
    messages, sent = exchange(workers, 1000)
    expected = messages * link.latency + sent / link.bandwidth
    assert scaling.all_reduce_seconds(1000, workers, link) == pytest.approx(expected)
    least = 2 * (workers - 1) / workers  # seconds for as many gigabytes
    assert scaling.all_reduce_seconds(1e9, workers, link) == pytest.approx(least, rel=1e-3)
