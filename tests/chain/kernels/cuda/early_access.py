"""Which arguments a compiled kernel may touch before it has waited for the kernel before it."""

import re
from collections import defaultdict
from collections.abc import Sequence

from tests.chain.kernels.cuda.compiling import Compiled

_LABEL = re.compile(r"(\$\w+):")
_REGISTER = re.compile(r"%[a-z]+\d+")
_PARAMETER = re.compile(r"_param_(\d+)\]")
_POINTER = re.compile(r"\.param \.u64 \.ptr .*_param_(\d+)")
_GUARDED = re.compile(r"(@!?%\w+|)\s*(.*)")
_ACCESS = re.compile(r"(ld|st|atom|red|cp\.async)\b.*?\.global")


def touched_before_wait(kernel: Compiled) -> tuple[set[str], set[str]]:
    """Arguments from which it may read, and to which it may write, on some way to the wait.

    A way without a wait counts to its end. Hints to the cache (`prefetch`) read nothing. Every
    branch is followed, so the order of lines does not matter, and a register may hold whatever
    flows into it on some way.
    """
    statements, labels = _statements(kernel.ptx)
    reached: set[int] = set()
    ways = [0]
    while ways:
        place = ways.pop()
        if place in reached or place == len(statements):
            continue
        reached.add(place)
        guard, words = statements[place]
        if words.startswith("griddepcontrol.wait"):
            continue
        if target := re.match(r"bra\S*\s+(\$\w+)", words):
            ways.append(labels[target[1]])
        if guard or not re.match(r"(bra|ret)\b", words):
            ways.append(place + 1)
    before = [statements[place][1] for place in sorted(reached)]
    origins = _origins(before, set(map(int, _POINTER.findall(kernel.ptx))))
    read: set[str] = set()
    written: set[str] = set()
    for words in before:
        if access := _ACCESS.match(words):
            is_write = access[1] in ("st", "atom", "red")
            # a copy to shared memory has its source last
            address = re.findall(r"\[([^]]*)\]", words)[0 if is_write else -1]
            names = {
                kernel.arguments[place]
                for register in _REGISTER.findall(address)
                for place in origins[register]
            }
            assert names, f"an address that no argument gives: {words}"
            (written if is_write else read).update(names)
    return read, written


def _statements(ptx: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Instructions, each after its guard or "", and where labels point."""
    body = ptx[ptx.index("\n{", ptx.index(".entry")) + 2 :]
    found: list[tuple[str, str]] = []
    labels = {}
    for line in re.sub(r"//.*", "", body).splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(found)
            continue
        for part in line.split(";"):
            guarded = _GUARDED.fullmatch(part.strip(" \t{}"))
            assert guarded is not None, part
            if guarded[2] and not guarded[2].startswith("."):
                found.append((guarded[1], guarded[2]))
    return found, labels


def _origins(statements: Sequence[str], pointers: set[int]) -> dict[str, set[int]]:
    """From which pointers, by their places among the arguments, each register may be made."""
    origins: dict[str, set[int]] = defaultdict(set)
    # what is read from memory is no address
    moves = [words for words in statements if not _ACCESS.match(words)]
    size = -1
    while size != (size := sum(map(len, origins.values()))):
        for words in moves:
            first, *others = _REGISTER.findall(words) or [""]
            given = pointers & set(map(int, _PARAMETER.findall(words)))
            origins[first] |= given.union(*(origins[register] for register in others))
    return origins
