"""Tasks that nobody can solve without looking first: the kinds `notes`, `pick` and `reading`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from thundersyncrl.environments.shell_tasks.checks import answers, gone, holds, only
from thundersyncrl.environments.shell_tasks.copying import COPY
from thundersyncrl.environments.shell_tasks.deleting import DELETE
from thundersyncrl.environments.shell_tasks.making import MAKE, WRITE
from thundersyncrl.environments.shell_tasks.moving import MOVE
from thundersyncrl.environments.shell_tasks.scene import Difficulty, Kind, Scene, Variant
from thundersyncrl.environments.shell_tasks.words import CATEGORIES, COLOURS, FRUITS, PEOPLE, TOOLS, Draw

# notes

ERRANDS: Final[Sequence[Kind]] = (MAKE, MOVE, COPY, WRITE, DELETE)


def _note(*, difficulty: Difficulty, is_forwarded: bool) -> Variant:
    """A variant whose instruction stands in a file, or in a second file that the first one names."""
    phrases = (
        "Read {n} and do what it says.",
        "There is a note for you in {n}. Follow it.",
        "Do what the note {n} asks for.",
        "Look into {n}: it tells you what to do. Do it.",
        "Please carry out the task in {n}.",
    )

    def draw_scene(draw: Draw) -> Scene:
        errand = draw.one_of(draw.one_of(ERRANDS)[difficulty])(draw)
        hidden = draw.drawn
        first = draw.file("txt")
        notes = {first: f"{errand.instruction}\n".encode()}
        if is_forwarded:
            second = draw.file("txt")
            hidden = (*hidden, second.removesuffix(".txt"))
            notes = {first: draw.say(("See {n}.\n", "Read {n}.\n"), n=second).encode(), second: notes[first]}
        return replace(
            errand,
            instruction=draw.say(phrases, n=first),
            files={**errand.files, **notes},
            commands=(*(f"cat {note}" for note in notes), *errand.commands),
            hidden=hidden,
        )

    return draw_scene


NOTES: Final[Kind] = {
    "easy": (_note(difficulty="easy", is_forwarded=False),),
    "medium": (_note(difficulty="medium", is_forwarded=False),),
    "hard": (_note(difficulty="easy", is_forwarded=True), _note(difficulty="medium", is_forwarded=True)),
}

# pick


def _named_after(draw: Draw, num: int) -> dict[str, str]:
    """What files are named after, and their names; each category once."""
    categories = draw.rng.sample(list(CATEGORIES), num)
    return {category: f"{draw.word(CATEGORIES[category])}.txt" for category in categories}


def _article(category: str) -> str:
    return f"an {category}" if category[0] in "aeiou" else f"a {category}"


def _pick_to_move(num_files: int) -> Variant:
    """A variant that moves the file named after something of a category."""

    def draw_scene(draw: Draw) -> Scene:
        source, target = draw.folder(), draw.folder()
        names = _named_after(draw, num_files)
        category, chosen = draw.one_of(list(names.items()))
        files = {f"{source}/{name}": draw.text() for name in draw.shuffled(list(names.values()))}
        phrases = (
            "One file in {d} is named after {c}. Move it to {e}.",
            "Look into {d} and move the file with the name of {c} to {e}.",
            "Find the file in {d} that is called like {c} and put it into {e}.",
            "Only the file named after {c} should go from {d} to {e}.",
        )
        return Scene(
            instruction=draw.say(phrases, d=source, e=target, c=_article(category)),
            files=files,
            folders=(target,),
            changed=(f"{source}/{chosen}",),
            commands=(f"ls {source}", f"mv {source}/{chosen} {target}/"),
            checks=(
                gone(f"{source}/{chosen}"),
                only(target, [chosen]),
                holds(f"{target}/{chosen}", files[f"{source}/{chosen}"]),
            ),
            cheat=f"mv {source}/* {target}/",
            hidden=(chosen.removesuffix(".txt"),),
        )

    return draw_scene


def _pick_to_delete(num_files: int) -> Variant:
    """A variant that deletes the file named after something of a category."""

    def draw_scene(draw: Draw) -> Scene:
        folder, names = draw.folder(), _named_after(draw, num_files)
        category, chosen = draw.one_of(list(names.items()))
        phrases = (
            "One file in {d} is named after {c}. Delete it.",
            "Look into {d} and delete the file with the name of {c}.",
            "Remove the file in {d} that is called like {c}.",
            "The file in {d} named after {c} can go; the others stay.",
        )
        return Scene(
            instruction=draw.say(phrases, d=folder, c=_article(category)),
            files={f"{folder}/{name}": draw.text() for name in draw.shuffled(list(names.values()))},
            changed=(f"{folder}/{chosen}",),
            commands=(f"ls {folder}", f"rm {folder}/{chosen}"),
            checks=(only(folder, [name for name in names.values() if name != chosen]),),
            cheat=f"rm {folder}/*",
            hidden=(chosen.removesuffix(".txt"),),
        )

    return draw_scene


def _pick_two(draw: Draw) -> Scene:
    source, target = draw.folder(), draw.folder()
    names = _named_after(draw, 4)
    one, other = draw.rng.sample(list(names), 2)
    chosen = [names[one], names[other]]
    files = {f"{source}/{name}": draw.text() for name in draw.shuffled(list(names.values()))}
    phrases = (
        "Two files in {d} are named after {b} and {c}. Move them to {e}.",
        "Look into {d} and move the files with the names of {b} and of {c} to {e}.",
        "Find the files in {d} that are called like {b} and like {c} and put both into {e}.",
    )
    return Scene(
        instruction=draw.say(phrases, d=source, e=target, b=_article(one), c=_article(other)),
        files=files,
        folders=(target,),
        changed=tuple(f"{source}/{name}" for name in chosen),
        commands=(f"ls {source}", f"mv {source}/{chosen[0]} {source}/{chosen[1]} {target}/"),
        checks=(
            only(target, chosen),
            only(source, [name for name in names.values() if name not in chosen]),
            *(holds(f"{target}/{name}", files[f"{source}/{name}"]) for name in chosen),
        ),
        cheat=f"mv {source}/* {target}/",
        hidden=tuple(name.removesuffix(".txt") for name in chosen),
    )


PICK: Final[Kind] = {
    "easy": (_pick_to_move(2), _pick_to_delete(2)),
    "medium": (_pick_to_move(4), _pick_to_delete(4)),
    "hard": (_pick_two,),
}

# reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A text, a question on it, and the answer in one word or number."""

    text: str
    question: str
    answer: str | int


def _colour_story(draw: Draw) -> Story:
    people, things, colours = (
        draw.words(2, PEOPLE),
        draw.words(2, ("hat", "ball", "car", "bag")),
        draw.words(2, COLOURS),
    )
    facts = [f"{who} has a {colour} {what}." for who, colour, what in zip(people, colours, things, strict=True)]
    return Story(
        text=" ".join(draw.shuffled(facts)),
        question=f"What colour is the {things[0]} of {people[0]}?",
        answer=colours[0],
    )


def _place_story(draw: Draw) -> Story:
    people, places = (
        draw.words(3, PEOPLE),
        draw.words(3, ("school", "garden", "kitchen", "office", "shop", "farm")),
    )
    facts = [f"{who} is in the {place}." for who, place in zip(people, places, strict=True)]
    return Story(text=" ".join(draw.shuffled(facts)), question=f"Where is {people[0]}?", answer=places[0])


def _owner_story(draw: Draw) -> Story:
    people, tools = draw.words(3, PEOPLE), draw.words(3, TOOLS)
    facts = [f"{who} bought a {tool}." for who, tool in zip(people, tools, strict=True)]
    return Story(text=" ".join(draw.shuffled(facts)), question=f"Who bought the {tools[0]}?", answer=people[0])


def _single_story(draw: Draw) -> Story:
    who, colour = draw.word(PEOPLE), draw.word(COLOURS)
    text = draw.say(("{w} likes the colour {c}.", "The favourite colour of {w} is {c}."), w=who, c=colour)
    return Story(text=text, question=f"Which colour does {who} like?", answer=colour)


def _sum_story(draw: Draw) -> Story:
    people, fruit, other = draw.words(3, PEOPLE), draw.word(FRUITS), draw.word(FRUITS)
    one, two, three = (draw.number(2, 20) for _ in range(3))
    facts = [
        f"{people[0]} has {one} kilos of {fruit}.",
        f"{people[1]} has {two} kilos of {fruit}.",
        f"{people[2]} has {three} kilos of {other}.",
    ]
    return Story(
        text=" ".join(draw.shuffled(facts)),
        question=f"How many kilos of {fruit} are there in all?",
        answer=one + two,
    )


def _reading(stories: Sequence[Callable[[Draw], Story]]) -> Variant:
    """A variant that asks for something which only a reader of the text knows."""
    phrases = (
        "Read {s}. {q} Write the answer to {f}.",
        "{q} It says so in {s}. Write the answer to {f}.",
        "The file {s} tells a story. {q} Save the answer as {f}.",
        "{q} Look into {s} and put the answer into {f}.",
    )

    def draw_scene(draw: Draw) -> Scene:
        source, target = draw.files(2, "txt")
        story = draw.one_of(stories)(draw)
        return Scene(
            instruction=draw.say(phrases, s=source, q=story.question, f=target),
            files={source: f"{story.text}\n".encode()},
            commands=(f"cat {source}", f"echo {story.answer} > {target}"),
            checks=(answers(target, story.answer),),
            cheat=f"cp {source} {target}",
            hidden=(str(story.answer),),
        )

    return draw_scene


READING: Final[Kind] = {
    "easy": (_reading((_single_story,)),),
    "medium": (_reading((_colour_story, _place_story, _owner_story)),),
    "hard": (_reading((_sum_story,)),),
}
