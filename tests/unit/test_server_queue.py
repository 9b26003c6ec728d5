"""Who is served next, and who is told to come again."""

from __future__ import annotations

import asyncio
import time
import weakref

import pytest

from portable_dit.catalog import load_recipe, read_spec
from portable_dit.request import Request, validate_request
from portable_dit.server.messages import Stepped, Summary
from portable_dit.server.queue import FairQueue
from portable_dit.server.refusal import ApiError
from portable_dit.server.settings import Limits
from portable_dit.server.ticket import KEPT_PREVIEWS, Ticket, cancelled

SPEC = read_spec(load_recipe("cpu/h3-mini"))


def ticket(client: str = "one", *, images: int = 1) -> Ticket:
    request = validate_request(Request("a red apple", size=(256, 256), images=images), SPEC)
    return Ticket(request, client=client, deadline=time.monotonic() + 60)


async def taken(queue: FairQueue, count: int) -> list[Ticket]:
    return [await queue.take() for _ in range(count)]


def served(*tickets: Ticket) -> list[str]:
    """The clients in the order in which they are served."""

    async def work() -> list[str]:
        queue = FairQueue(Limits())
        for one in tickets:
            queue.put(one)
        return [one.client for one in await taken(queue, len(tickets))]

    return asyncio.run(work())


def test_one_client_is_served_in_order():
    async def work() -> None:
        queue, own = FairQueue(Limits()), [ticket() for _ in range(5)]
        for one in own:
            queue.put(one)
        assert await taken(queue, 5) == own

    asyncio.run(work())


def test_clients_take_turns():
    order = served(*(ticket("many") for _ in range(4)), ticket("one"), ticket("two"))
    assert order.index("one") <= 2
    assert order.index("two") <= 2


def test_turns_are_of_work_and_not_of_requests():
    """A client of large pictures waits for as many small ones as make up the same work."""
    large = [ticket("large", images=16) for _ in range(2)]
    small = [ticket("small") for _ in range(16)]
    order = served(*large, *small)
    assert order.index("large") == 0
    assert order[2:].index("large") >= 13, order


def test_a_client_that_was_away_gets_no_credit_for_it():
    async def work() -> None:
        queue = FairQueue(Limits())
        for _ in range(10):
            queue.put(ticket("busy"))
        await taken(queue, 10)
        for _ in range(3):
            queue.put(ticket("late"))
            queue.put(ticket("busy"))
        order = [one.client for one in await taken(queue, 6)]
        assert sorted(order[:2]) == sorted(order[2:4]) == ["busy", "late"]

    asyncio.run(work())


def test_a_cancelled_ticket_is_passed_over_and_counts_no_more():
    async def work() -> None:
        queue, first, second = FairQueue(Limits(queue=2)), ticket(), ticket()
        queue.put(first)
        queue.put(second)
        with pytest.raises(ApiError):
            queue.put(ticket())
        first.cancel(cancelled("test"))
        queue.put(ticket())
        assert queue.position(second) == 0
        assert await queue.take() is second

    asyncio.run(work())


def test_a_cancelled_ticket_is_not_kept_alive_by_the_queue():
    """Its references may be large, and the device may be busy for long."""
    queue, gone = FairQueue(Limits()), ticket()
    queue.put(gone)
    gone.cancel(cancelled("test"))
    trace = weakref.ref(gone)
    del gone
    queue.put(ticket())
    assert trace() is None


def test_what_was_taken_and_never_begun_gets_its_turn_back():
    async def work() -> None:
        queue, told = FairQueue(Limits()), []
        for client in ("one", "one", "two"):
            queue.put(ticket(client))
        order = await taken(queue, 3)
        for one in order:
            one.on_cancel(lambda: told.append("the worker that is gone"))
        order[0].start()
        queue.give_back(order[2])
        queue.give_back(order[1])
        queue.put(ticket("one"))
        assert [queue.position(one) for one in order] == [None, 0, 1]
        assert await taken(queue, 2) == order[1:]
        order[2].cancel(cancelled("test"))
        assert not told

    asyncio.run(work())


def test_a_full_queue_says_when_to_come_again_from_what_it_measured():
    async def work() -> None:
        queue = FairQueue(Limits(queue=4))
        one = ticket()
        queue.put(one)
        queue.measured([await queue.take()], 10.0)
        one.start()
        for _ in range(4):
            queue.put(ticket())
        assert queue.seconds_ahead() == pytest.approx(40.0)
        with pytest.raises(ApiError) as refused:
            queue.put(ticket())
        assert refused.value.status_code == 429
        assert refused.value.headers == {"Retry-After": "20"}

    asyncio.run(work())


def test_one_client_may_not_fill_the_queue_while_others_wait():
    async def work() -> None:
        queue = FairQueue(Limits(queue=6))
        queue.put(ticket("other"))
        for _ in range(3):
            queue.put(ticket("greedy"))
        with pytest.raises(ApiError, match="of this client"):
            queue.put(ticket("greedy"))
        queue.put(ticket("third"))

    asyncio.run(work())


def test_pixels_that_wait_are_limited_but_one_request_always_fits():
    async def work() -> None:
        queue = FairQueue(Limits(queue_pixels=256 * 256))
        queue.put(ticket(images=4))
        with pytest.raises(ApiError, match="pixels wait"):
            queue.put(ticket())

    asyncio.run(work())


def test_taking_can_be_cancelled_without_losing_a_ticket():
    async def work() -> None:
        queue, one = FairQueue(Limits()), ticket()
        taking = asyncio.ensure_future(queue.take())
        await asyncio.sleep(0)
        queue.put(one)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert await asyncio.wait_for(queue.take(), 60) is one

    asyncio.run(work())


def test_what_was_accepted_before_a_restart_is_accepted_whatever_the_queue_holds():
    async def work() -> None:
        queue = FairQueue(Limits(queue=1))
        queue.put(ticket())
        queue.put(ticket(), again=True)
        queue.refusing = ApiError(503, "stopping")
        with pytest.raises(ApiError, match="stopping"):
            queue.put(ticket())
        assert len(queue.waiting()) == 2

    asyncio.run(work())


def test_every_watcher_of_a_ticket_sees_its_end_however_slow():
    async def work() -> None:
        one, at_once, later = ticket(), asyncio.Event(), asyncio.Event()
        at_once.set()

        async def watch(ready: asyncio.Event) -> list[str]:
            seen = []
            async for _ in one.changes():
                seen.append(one.status)
                await asyncio.sleep(0)
                await ready.wait()
            return seen

        watchers = [asyncio.ensure_future(watch(ready)) for ready in (at_once, later)]
        await asyncio.sleep(0)
        one.start()
        for step in range(1, 40):
            one.step(Stepped(one.id, 0, step, 40, b"preview"))
            await asyncio.sleep(0)
        one.finish(Summary({}, None, (), ()))
        later.set()
        fast, slow = await asyncio.gather(*watchers)
        assert fast[-1] == slow[-1] == "finished"
        assert len(slow) < len(fast)
        assert len(one.previews) == KEPT_PREVIEWS

    asyncio.run(work())


def test_a_cancel_reaches_the_worker_once_and_the_first_end_stays():
    async def work() -> None:
        one, told = ticket(), []
        one.on_cancel(lambda: told.append("cancel"))
        one.cancel(cancelled("first"))
        one.cancel(cancelled("second"))
        one.finish(Summary({}, None, (), ()))
        assert told == ["cancel"]
        assert one.status == "cancelled"
        assert one.failure is not None
        assert "first" in one.failure.detail

    asyncio.run(work())


def shaped(client: str, size: int, images: int = 1) -> Ticket:
    request = validate_request(Request("a red apple", size=(size, size), images=images), SPEC)
    return Ticket(request, client=client, deadline=time.monotonic() + 60)


def beside(*tickets: Ticket, pictures: int = 4) -> tuple[list[Ticket], list[Ticket]]:
    """(those that are taken together, those that still wait)."""

    async def work() -> tuple[list[Ticket], list[Ticket]]:
        queue = FairQueue(Limits())
        for one in tickets:
            queue.put(one)
        first = await queue.take()
        together = [first, *queue.take_beside(first, pictures)]
        return together, queue.waiting()

    return asyncio.run(work())


def test_those_of_one_shape_are_taken_together_as_far_as_pictures_go():
    small = [shaped("one", 256) for _ in range(6)]
    assert beside(*small) == (small[:4], small[4:])
    assert beside(*small, pictures=1) == (small[:1], small[1:])


def test_nobody_is_overtaken_by_who_has_the_shape():
    """A client whose turn it is with another shape comes before the mates behind it."""
    first, other, mate = shaped("one", 256), shaped("two", 512), shaped("three", 256)
    assert beside(first, other, mate) == ([first], [other, mate])


def test_clients_take_turns_in_a_batch_too():
    many = [shaped("many", 256) for _ in range(6)]
    few = [shaped("one", 256), shaped("two", 256)]
    together, waiting = beside(*many, *few)
    assert sorted(ticket.client for ticket in together) == ["many", "many", "one", "two"]
    assert all(ticket.client == "many" for ticket in waiting)


def test_a_request_of_several_pictures_is_taken_whole_or_not_at_all():
    first, several, last = shaped("one", 256, 2), shaped("one", 256, 3), shaped("one", 256)
    assert beside(first, several, last) == ([first], [several, last])
    assert beside(first, several, last, pictures=5) == ([first, several], [last])
    assert beside(several, last, pictures=2) == ([several], [last])


def test_who_was_cancelled_is_no_mate_and_not_in_the_way():
    first, gone, mate = shaped("one", 256), shaped("one", 512), shaped("one", 256)
    gone.cancel(cancelled("test"))
    assert beside(first, gone, mate) == ([first, mate], [])


def test_who_has_lost_a_worker_has_no_mates():
    first, suspect, mate = (shaped("one", 256) for _ in range(3))
    suspect.lost = 1
    assert beside(first, suspect, mate) == ([first], [suspect, mate])
    assert beside(suspect, first, mate) == ([suspect], [first, mate])


def test_who_was_taken_waits_in_front_until_work_on_it_begins():
    """A worker's other replica may be drawing for somebody else."""

    async def work() -> None:
        queue, own = FairQueue(Limits(queue=2)), [ticket() for _ in range(4)]
        for one in own[:2]:
            queue.put(one)
        taken = await queue.take()
        assert [queue.position(one) for one in own[:2]] == [0, 1]
        queue.put(own[2])  # what was taken is not in the queue's count any more
        taken.start()
        assert [queue.position(one) for one in own[:3]] == [None, 0, 1]
        with pytest.raises(ApiError, match="2 requests wait"):
            queue.put(own[3])

    asyncio.run(work())
