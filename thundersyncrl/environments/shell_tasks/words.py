"""Names, lines and phrasings for one task, all drawn from one random stream.

The pools hold short common words, because small language models spell those reliably. No word contains
another, so that searching for one never finds another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final, TypeVar


def _pool(words: str) -> tuple[str, ...]:
    return tuple(words.split())


ANIMALS: Final = _pool("cat dog horse cow tiger rabbit mouse lion bear wolf bird snake sheep goat duck frog")
FRUITS: Final = _pool("apple lemon banana cherry grape peach plum mango melon berry")
TOOLS: Final = _pool("hammer drill ladder brush needle shovel wrench knife nail bucket")
COLOURS: Final = _pool("red blue green yellow brown pink black white gray purple gold silver")
FOLDERS: Final = _pool("box bag shelf desk room garden office school kitchen farm shop attic archive drawer barn")
STEMS: Final = _pool(
    "song poem draft idea dream river cloud stone tree leaf flower moon star snow wood lamp chair "
    "table door road bridge plane boat wheel book coin shirt shoe glass bottle plate bread milk sugar salt "
    "rice soup cake cheese key kite drum music market city village island forest beach hill field"
)
PEOPLE: Final = _pool("Tom Ben Eva Max Lisa Paul Mary Jack Emma John Peter Sarah David Laura Julia Adam")
EXTENSIONS: Final = ("txt", "txt", "txt", "md", "log")
CATEGORIES: Final = {"animal": ANIMALS, "fruit": FRUITS, "tool": TOOLS, "colour": COLOURS}

T = TypeVar("T")


class Draw:
    """Draws what a task is made of; a name is never drawn twice for one task.

    Example:
        >>> draw = Draw(Random(1))
        >>> names = [draw.word() for _ in range(20)]
        >>> len(set(names))
        20
    """

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self._drawn: list[str] = []

    @property
    def drawn(self) -> tuple[str, ...]:
        """Every name drawn so far, in order and without file extensions."""
        return tuple(self._drawn)

    def word(self, pool: Sequence[str] = STEMS) -> str:
        """A word that this task doesn't use yet."""
        word = self.rng.choice([word for word in pool if word not in self._drawn])
        self._drawn.append(word)
        return word

    def words(self, num: int, pool: Sequence[str] = STEMS) -> list[str]:
        """`num` words that this task doesn't use yet."""
        return [self.word(pool) for _ in range(num)]

    def thing(self) -> str:
        """An unused animal, fruit, tool or colour: what files are about."""
        return self.word(self.rng.choice((ANIMALS, FRUITS, TOOLS, COLOURS)))

    def file(self, extension: str = "") -> str:
        """An unused file name, such as "river.txt"."""
        return f"{self.word()}.{extension or self.rng.choice(EXTENSIONS)}"

    def files(self, num: int, extension: str = "") -> list[str]:
        """`num` unused file names."""
        return [self.file(extension) for _ in range(num)]

    def folder(self) -> str:
        """An unused folder name, such as "garden"."""
        return self.word(FOLDERS)

    def text(self, num_lines: int = 1) -> bytes:
        """Lines that can't be guessed and name no `thing`, such as "Tom boat 5127"."""
        pools = (PEOPLE, STEMS)
        lines = (
            " ".join([*(self.rng.choice(pool) for pool in pools), str(self.rng.randrange(1000, 10000))])
            for _ in range(num_lines)
        )
        return "".join(f"{line}\n" for line in lines).encode()

    def clutter(self) -> dict[str, bytes]:
        """One file that has nothing to do with the task."""
        return {self.file(): self.text()}

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return self.rng.randint(low, high)

    def one_of(self, options: Sequence[T]) -> T:
        """One of the options."""
        return self.rng.choice(options)

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in another order than given (where there are two different ones)."""
        return until(lambda: self.rng.sample(items, len(items)), lambda order: len(items) < 2 or order != list(items))

    def say(self, phrases: Sequence[str], **names: object) -> str:
        """One of several ways to ask for the same thing."""
        return self.rng.choice(phrases).format_map(names)


def until(draw: Callable[[], T], holds: Callable[[T], bool]) -> T:
    """The first draw that fits; 1000 misses mean that the draw can't fit at all.

    Raises:
        AssertionError: nothing fitted, so the caller's condition is impossible.
    """
    for _ in range(1000):
        if holds(value := draw()):
            return value
    raise AssertionError("expected one of 1000 draws to fit, got none; the caller's condition is impossible")
