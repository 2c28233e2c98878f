"""Capacity, order, batches and closing of channels; balance of `deal`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.channels.channel import Channel, ChannelClosed, deal

DEADLINE_S = 20.0


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


async def settle() -> None:
    """Every task that can go on has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_order_and_batches() -> None:
    async def scenario() -> None:
        channel = Channel[int]("numbers", capacity=10)
        for number in range(7):
            await channel.put(number)
        assert len(channel) == 7
        assert await channel.get_batch(3) == [0, 1, 2]
        assert await channel.get_batch(100) == [3, 4, 5, 6], "what is there, not what was asked for"
        assert len(channel) == 0

    run(scenario())


def test_a_full_channel_holds_producers_back() -> None:
    async def scenario() -> None:
        channel = Channel[int]("numbers", capacity=2)
        producer = asyncio.create_task(_produce(channel, range(5)))
        await settle()
        assert len(channel) == 2
        assert not producer.done()
        assert await channel.get_batch(1) == [0]
        await settle()
        assert len(channel) == 2, "exactly the freed place is taken"
        taken = list[int]()
        while len(taken) < 4:
            taken += await channel.get_batch(1)
        await producer
        assert taken == [1, 2, 3, 4]

    run(scenario())


@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    capacity=st.integers(1, 6),
    batch=st.integers(1, 7),
)
def test_everything_arrives_once_in_each_producers_order(counts: list[int], capacity: int, batch: int) -> None:
    async def scenario() -> None:
        channel = Channel[tuple[int, int]]("pairs", capacity)
        producers = [
            asyncio.create_task(_produce(channel, [(name, number) for number in range(count)]))
            for name, count in enumerate(counts)
        ]
        taken = list[tuple[int, int]]()
        while len(taken) < sum(counts):
            assert len(channel) <= capacity
            got = await channel.get_batch(batch)
            assert 1 <= len(got) <= batch
            taken += got
        await asyncio.gather(*producers)
        for name, count in enumerate(counts):
            assert [number for producer, number in taken if producer == name] == list(range(count))

    run(scenario())


def test_an_empty_channel_holds_the_consumer_back() -> None:
    async def scenario() -> None:
        channel = Channel[int]("numbers", capacity=2)
        consumer = asyncio.create_task(channel.get_batch(5))
        await settle()
        assert not consumer.done()
        await channel.put(1)
        assert await consumer == [1]

    run(scenario())


def test_close_drains_and_then_ends() -> None:
    async def scenario() -> None:
        channel = Channel[int]("numbers", capacity=2)
        await channel.put(1)
        await channel.close()
        with pytest.raises(ChannelClosed, match="numbers"):
            await channel.put(2)
        assert await channel.get_batch(5) == [1], "what was inside can still be taken"
        with pytest.raises(ChannelClosed, match="numbers"):
            await channel.get_batch(5)

    run(scenario())


def test_close_wakes_everyone_who_waits() -> None:
    async def scenario() -> None:
        full, empty = Channel[int]("full", capacity=1), Channel[int]("empty", capacity=1)
        await full.put(1)
        waiting = [asyncio.create_task(full.put(2)), asyncio.create_task(empty.get_batch(1))]
        await settle()
        await full.close()
        await empty.close()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ChannelClosed, ChannelClosed]

    run(scenario())


def test_a_cancelled_producer_leaves_nothing() -> None:
    async def scenario() -> None:
        channel = Channel[int]("numbers", capacity=1)
        await channel.put(1)
        producer = asyncio.create_task(channel.put(2))
        await settle()
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
        assert await channel.get_batch(5) == [1]
        await channel.put(3)
        assert await channel.get_batch(5) == [3]

    run(scenario())


@given(loads=st.lists(st.integers(0, 30), min_size=1, max_size=8), num=st.integers(0, 40), weight=st.integers(1, 8))
def test_deal_balances(loads: list[int], num: int, weight: int) -> None:
    before = list(loads)
    dealt = deal(range(num), loads, weight)
    assert loads == before, "the caller's loads are its own"
    assert sorted(item for items in dealt for item in items) == list(range(num))
    assert all(items == sorted(items) for items in dealt), "in order"
    after = [load + weight * len(items) for load, items in zip(loads, dealt, strict=True)]
    for items, load in zip(dealt, after, strict=True):
        # Whoever received was the least loaded before, so ends at most one item above everybody.
        assert not items or load - weight <= min(after)


async def _produce(channel: Channel[Any], items: Any) -> None:
    for item in items:
        await channel.put(item)
