"""Timelines as text for a terminal, and as a Chrome trace. (``reports.plot`` draws them as an image.)"""

from collections.abc import Iterable
from typing import Any, TypeVar

from megatron_core.planner.simulate import Timeline, peak_activations
from megatron_core.schedules.actions import Action, Plan

# Okabe and Ito's palette for colour-blind readers; its colours also differ in brightness.
COLOURS = {"F": "#56b4e9", "B": "#d55e00", "I": "#e69f00", "W": "#009e73"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_PALEST = 0.55  # share of white in the shade of the last chunk
IN_FLIGHT = "in flight"
"""Category of the events of transfers."""
MOST_RANKS = 2**20
"""Identifiers of threads of a trace: those of a rank's tracks differ by this number."""
_RESET = "\x1b[0m"
_MOST_COLUMNS = 8  # of the shortest action: wider boxes add no information


def shade(colour: str, chunk: int, num_chunks: int) -> str:
    """Return the colour of a chunk: later chunks are paler."""
    white = _PALEST * chunk / max(num_chunks - 1, 1)
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in bytes.fromhex(colour[1:]))


def kinds(plan: Plan) -> list[str]:
    """Return the kinds of action in a plan, in the order of the legend."""
    present = {action.kind for actions in plan.ranks for action in actions}
    return [action_kind for action_kind in COLOURS if action_kind in present]


def four_digits(time: float) -> str:
    """Format a time with four significant digits, or with all digits before the decimal point."""
    return f"{time:.4g}" if time < 1e4 else f"{time:.0f}"


T = TypeVar("T", bound=Any)
"""An interval with ``start`` and ``end``."""


def tracks(intervals: Iterable[T]) -> list[list[T]]:
    """Divide intervals that overlap in time among as few tracks as possible, in the order of their starts."""
    divided: list[list[T]] = []
    for interval in sorted(intervals, key=lambda interval: interval.start):
        # The first track that is free (first fit), which needs as few tracks as there are intervals at one time.
        track = next((track for track in divided if track[-1].end <= interval.start), None)
        if track is None:
            divided.append([interval])
        else:
            track.append(interval)
    return divided


def timeline_summary(timeline: Timeline) -> str:
    """Return bubble, makespan and peak memory on one line."""
    peaks = peak_activations(timeline.plan)
    return (
        f"bubble {timeline.bubble:.1%}, idle {timeline.idle:.1%}, makespan {four_digits(timeline.makespan)}, "
        f"peak activations {max(peaks):g} micro-batches"
    )


def timeline_picture(
    timeline: Timeline, title: str, *, width: int = 100, colour: bool = False, longest: float | None = None
) -> str:
    """Draw one line per rank over time, with the micro-batch in each box and the rank's peak memory at the end.

    ``width``: columns of the terminal. With ``colour`` the colour of a box is the kind of the action, paler for later
    chunks; without it a box begins with the letter of the kind, in lower case on odd chunks. Below a measured rank,
    ``=`` marks its transfers in flight. ``longest`` is the makespan that fills the width, so that several drawings have
    the same scale; without it, the shortest action has an integer number of columns if possible.
    """
    plan = timeline.plan
    peaks = peak_activations(plan)
    labels = [f"rank {rank} " for rank in range(len(plan.ranks))]
    margin = max(map(len, labels))
    ends = [f" {peak:g}" for peak in peaks]
    columns = _columns(timeline, width - margin - max(len("peak"), *map(len, ends)) - 1, longest)
    lines = [title, " " * (margin + columns) + " peak"]
    for rank, label in enumerate(labels):
        lines.append(label.ljust(margin) + _row(timeline, rank, columns, colour) + ends[rank])
        if timeline.transfers and (marks := _transfer_row(timeline, rank, columns).rstrip()):
            lines.append(" " * margin + marks)
    shares = (
        f"{label}computation {share['computation']:.1%}, waiting for collectives {share['collectives']:.1%}, "
        f"idle {share['idle']:.1%}"
        for label, share in zip(labels, timeline.shares, strict=False)  # only if measured
    )
    legend = _legend(plan, colour) + (", = transfer in flight" if any(timeline.transfers) else "")
    return "\n".join([*lines, legend, *shares, *_totals(timeline), timeline_summary(timeline)])


def _totals(timeline: Timeline) -> list[str]:
    """Describe each rank's transfers of the step by name; their order does not depend on times."""
    return [
        f"rank {rank} {name}: {total['number']:g} transfers, in flight {four_digits(total['in_flight'])}, waited "
        f"{four_digits(total['waited'])}"
        for rank, totals in enumerate(timeline.traffic)
        for name, total in sorted(totals.items())
    ]


def _columns(timeline: Timeline, room: int, longest: float | None) -> int:
    """Columns of the whole timeline: its share of the room, or an integer for the shortest action if possible."""
    if longest:
        return max(round(room * timeline.makespan / longest), 1)
    times = (end - start for start, end in timeline.boxes.values())
    shortest = min((time for time in times if time > 0), default=timeline.makespan)
    if not shortest:
        return room
    units = timeline.makespan / shortest
    # Equal actions then have equal widths, and a pattern is visible.
    columns_per_unit = min(int(room / units), _MOST_COLUMNS)
    return round(columns_per_unit * units) if columns_per_unit else max(room, 1)


def _row(timeline: Timeline, rank: int, columns: int, colour: bool) -> str:
    """Draw a rank's boxes, with idle time between them; those of a pair are side by side."""
    first = min(timeline.start.values())
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    text = ""
    column = 0
    for action in timeline.plan.ranks[rank]:
        start, stop = timeline.boxes[action]
        begin = max(round((start - first) * scale), column)
        # Rounded from absolute times, so that rounding errors do not add up along a row.
        end = max(round((stop - first) * scale), begin)
        text += (" " if colour else ".") * (begin - column) + _box(timeline.plan, action, end - begin, colour)
        column = end
    return text + (" " if colour else ".") * (columns - column)


def _transfer_row(timeline: Timeline, rank: int, columns: int) -> str:
    """Mark the columns in which a transfer is in flight; transfers after the last action are not drawn."""
    first = min(timeline.start.values())
    marks = [" "] * columns
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    for transfer in timeline.transfers[rank]:
        begin = (transfer.start - first) * scale
        end = (transfer.end - first) * scale
        for column in range(max(int(begin), 0), min(max(round(end), int(begin) + 1), columns)):
            marks[column] = "="
    return "".join(marks)


def _box(plan: Plan, action: Action, width: int, colour: bool) -> str:
    """Draw an action in ``width`` columns, without its number if the number does not fit."""
    number = str(action.micro)
    chunk = plan.chunks[action.stage]
    if not colour:
        letter = action.kind.lower() if chunk % 2 else action.kind
        return (letter + number if len(number) < width else letter).ljust(width, "-")[:width]
    # The thin bar at a box's left edge separates it from its neighbour of the same colour.
    label = ("\u258f" + number.center(width - 1) if len(number) < width else "").ljust(width)[:width]
    return _paint(label, shade(COLOURS[action.kind], chunk, plan.num_chunks))


def _paint(text: str, colour: str) -> str:
    """Print black text on one of the terminal's 256 colours: a 6 x 6 x 6 cube of red, green and blue."""
    red, green, blue = (_cube_step(channel) for channel in bytes.fromhex(colour[1:]))
    return f"\x1b[38;5;16;48;5;{16 + 36 * red + 6 * green + blue}m{text}{_RESET}" if text else ""


def _cube_step(channel: int) -> int:
    steps = (0, 95, 135, 175, 215, 255)
    return min(range(6), key=lambda step: abs(steps[step] - channel))


def _legend(plan: Plan, colour: bool) -> str:
    """Explain the colours, or the letters."""
    if colour:
        words = [f"{_paint('  ', COLOURS[action_kind])} {NAMES[action_kind]}" for action_kind in kinds(plan)]
        return "  ".join(words) + (", later chunks paler" if plan.num_chunks > 1 else "")
    words = [f"{action_kind} {NAMES[action_kind]}" for action_kind in kinds(plan)]
    return ", ".join(words) + (", odd chunks in lower case" if plan.num_chunks > 1 else "")


def complete_event(
    name: str, category: str, process: int, thread: int, start: float, end: float, about: dict[str, Any]
) -> dict[str, Any]:
    """A complete event of Chrome's trace format; times in microseconds."""
    times = {"ts": start, "dur": end - start}
    return {"name": name, "cat": category, "ph": "X", "pid": process, "tid": thread, **times, "args": about}


def chrome_trace(timeline: Timeline, *, label: str = "", first: int = 0) -> dict[str, Any]:
    """Return the timeline, with times in milliseconds, in Chrome's trace format, for chrome://tracing or Perfetto: one
    process per rank.

    Below a measured rank's actions are tracks of its transfers in flight. ``label`` is a prefix of the ranks' names,
    and ``first`` is the number of rank 0; use both to merge several timelines into one trace.
    """
    events: list[dict[str, Any]] = []
    for rank, actions in enumerate(timeline.plan.ranks):
        name = {"name": f"{label}pipeline rank {rank}"}
        number = first + rank
        events.append({"name": "thread_name", "ph": "M", "pid": number, "tid": number, "args": name})
        for action in actions:
            start, end = timeline.boxes[action]
            about = {"stage": action.stage, "micro": action.micro, "chunk": timeline.plan.chunks[action.stage]}
            category = NAMES[action.kind]
            events.append(complete_event(str(action), category, number, number, 1e3 * start, 1e3 * end, about))
        transfers = timeline.transfers[rank] if timeline.transfers else ()
        for track, flights in enumerate(tracks(transfers), start=1):
            thread = MOST_RANKS * track + number
            name = {"name": f"{label}{IN_FLIGHT}"}
            events.append({"name": "thread_name", "ph": "M", "pid": number, "tid": thread, "args": name})
            for flight in flights:
                waited = {"waited_us": 1e3 * flight.waited}
                interval = (1e3 * flight.start, 1e3 * flight.end)
                events.append(complete_event(flight.name, IN_FLIGHT, number, thread, *interval, waited))
    return {"traceEvents": events, "displayTimeUnit": "ms"}
