"""Tasks on structured text: the kinds `csv` and `json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from thundersyncrl.environments.shell_tasks.checks import answers, holds, is_json
from thundersyncrl.environments.shell_tasks.scene import Kind, Scene
from thundersyncrl.environments.shell_tasks.words import ANIMALS, COLOURS, FRUITS, PEOPLE, Draw

# csv

TEXT_COLUMNS: Final = {"pet": ANIMALS, "color": COLOURS, "fruit": FRUITS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of people; every cell in its column `name` or `age` is different."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def column(self, name: str) -> list[str]:
        return [row[self.columns.index(name)] for row in self.rows]

    @property
    def content(self) -> bytes:
        return "".join(f"{','.join(row)}\n" for row in (self.columns, *self.rows)).encode()


def _table(draw: Draw, num_rows: int) -> Table:
    columns = tuple(draw.shuffled(["name", "age", draw.one_of(list(TEXT_COLUMNS))]))
    ages, people = draw.rng.sample(range(10, 99), num_rows), draw.rng.sample(PEOPLE, num_rows)

    def cell(column: str, row: int) -> str:
        if column == "name":
            return people[row]
        return str(ages[row]) if column == "age" else draw.one_of(TEXT_COLUMNS[column][:4])

    rows = tuple(tuple(cell(column, row) for column in columns) for row in range(num_rows))
    return Table(columns=columns, rows=rows)


def _csv_header(draw: Draw) -> Scene:
    source, target, table = draw.file("csv"), draw.file("txt"), _table(draw, 5)
    phrases = (
        "Write the header line of {f} to {g}.",
        "Save the line with the column names of {f} as {g}.",
        "Put just the header of the table {f} into {g}.",
        "I need the first line of {f}, its header, in {g}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=source, g=target),
        files={source: table.content},
        commands=(f"head -n 1 {source} > {target}",),
        checks=(holds(target, ",".join(table.columns)),),
        cheat=f"cp {source} {target}",
    )


def _csv_column(draw: Draw) -> Scene:
    source, target, table = draw.file("csv"), draw.file("txt"), _table(draw, 5)
    num = draw.number(1, 3)
    phrases = (
        "Write column {n} of {f} with its header to {g}.",
        "Save the whole column number {n} of {f} as {g}.",
        "Put column {n} of the table {f}, header included, into {g}.",
        "Cut out column {n} of {f}, from the header to the last row, and save it as {g}.",
    )
    cells = [row[num - 1] for row in (table.columns, *table.rows)]
    return Scene(
        instruction=draw.say(phrases, n=num, f=source, g=target),
        files={source: table.content},
        commands=(f"cut -d , -f {num} {source} > {target}",),
        checks=(holds(target, "\n".join(cells)),),
        cheat=f"cp {source} {target}",
    )


def _csv_rows(draw: Draw) -> Scene:
    source, target, table = draw.file("csv"), draw.file("txt"), _table(draw, draw.number(4, 9))
    phrases = (
        "Count the rows of {f} without the header and write the number to {g}.",
        "How many rows does {f} have below its header? Save the number as {g}.",
        "Write the number of people in {f} to {g}; the first line is a header.",
        "Put the number of data rows of {f} into {g}, not counting the header.",
    )
    return Scene(
        instruction=draw.say(phrases, f=source, g=target),
        files={source: table.content},
        commands=(f"tail -n +2 {source} | wc -l > {target}",),
        checks=(answers(target, len(table.rows)),),
        cheat=f"wc -l < {source} > {target}",
    )


def _csv_extreme(draw: Draw) -> Scene:
    source, target, table = draw.file("csv"), draw.file("txt"), _table(draw, 4)
    extreme, pick = draw.one_of((("oldest", max), ("youngest", min)))
    ages = [int(age) for age in table.column("age")]
    name = table.column("name")[ages.index(pick(ages))]
    phrases = (
        "Who is the {x} person in {f}? Write the name to {g}.",
        "Look at {f} and write the name of the {x} person to {g}.",
        "Save the name of the {x} person in the table {f} as {g}.",
        "Read {f}. Who is {x}? Put just the name into {g}.",
    )
    return Scene(
        instruction=draw.say(phrases, x=extreme, f=source, g=target),
        files={source: table.content},
        commands=(f"cat {source}", f"echo {name} > {target}"),
        checks=(answers(target, name),),
        cheat=f"head -n 2 {source} > {target}",
        hidden=(name,),
    )


def _csv_sum(draw: Draw) -> Scene:
    source, target, table = draw.file("csv"), draw.file("txt"), _table(draw, draw.number(4, 7))
    num = table.columns.index("age") + 1
    phrases = (
        "Add up the numbers in column {n} of {f} and write the sum to {g}. The first line is a header.",
        "What is the sum of column {n} of {f}, not counting the header? Save it as {g}.",
        "Write the total of column {n} of the table {f} to {g}; skip the header.",
    )
    return Scene(
        instruction=draw.say(phrases, n=num, f=source, g=target),
        files={source: table.content},
        commands=(f"awk -F, 'NR>1{{s+=${num}}}END{{print s}}' {source} > {target}",),
        checks=(answers(target, sum(map(int, table.column("age")))),),
        cheat=f"cut -d , -f {num} {source} > {target}",
    )


def _csv_sort(draw: Draw) -> Scene:
    source, target, table = draw.file("csv"), draw.file("csv"), _table(draw, 6)
    num = table.columns.index("age") + 1
    phrases = (
        "Sort the rows of {f} by the number in column {n}, smallest first, header on top. Save them as {g}.",
        "Write the table {f} to {g}, header on top, with its rows ordered by column {n} from small to large.",
        "Make {g} from {f}: the header first, then the rows, sorted by the value of column {n}.",
    )
    rows = sorted(table.rows, key=lambda row: int(row[num - 1]))
    return Scene(
        instruction=draw.say(phrases, n=num, f=source, g=target),
        files={source: table.content},
        commands=(f"(head -n 1 {source}; tail -n +2 {source} | sort -t, -k{num},{num}n) > {target}",),
        checks=(holds(target, Table(columns=table.columns, rows=tuple(rows)).content),),
        cheat=f"cp {source} {target}",
    )


# json

IMAGE: Final = "python:3.12-bookworm"
"""A plain image with an interpreter that reads JSON, for agent and verifier."""


def _json_lines(value: object) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()


def _settings(draw: Draw) -> dict[str, object]:
    """Settings of which the first is a number, the second a word, the third a truth value, in any order."""
    keys = draw.words(4)
    values = (draw.number(10, 9999), draw.thing(), draw.one_of((True, False)), draw.number(10, 9999))
    return dict(zip(keys, values, strict=True))


def _json_get(draw: Draw) -> Scene:
    source, target, settings = draw.file("json"), draw.file("txt"), _settings(draw)
    key = next(iter(settings))
    phrases = (
        "Write the number that {k} has in {f} to {g}.",
        "Save the value of {k} in {f} as {g}, just the number.",
        "What is the value of {k} in {f}? Put it into {g}.",
        "Get the number stored under {k} in {f} and write it to {g}.",
    )
    return Scene(
        instruction=draw.say(phrases, k=key, f=source, g=target),
        files={source: _json_lines(dict(draw.shuffled(list(settings.items()))))},
        commands=(f"grep {key} {source} | grep -o '[0-9]*' > {target}",),
        checks=(answers(target, str(settings[key])),),
        cheat=f"grep {key} {source} > {target}",
        image=IMAGE,
    )


def _json_get_word(draw: Draw) -> Scene:
    source, target, settings = draw.file("json"), draw.file("txt"), _settings(draw)
    key = list(settings)[1]
    phrases = (
        "Write the word that {k} has in {f} to {g}, without quotes.",
        "Save the value of {k} in {f} as {g}, without the quotes.",
        "Which word is stored under {k} in {f}? Put it into {g}, unquoted.",
    )
    return Scene(
        instruction=draw.say(phrases, k=key, f=source, g=target),
        files={source: _json_lines(dict(draw.shuffled(list(settings.items()))))},
        commands=(f"grep {key} {source} | cut -d '\"' -f 4 > {target}",),
        checks=(answers(target, str(settings[key])),),
        cheat=f"grep {key} {source} > {target}",
        image=IMAGE,
    )


def _json_set(draw: Draw) -> Scene:
    source, settings = draw.file("json"), _settings(draw)
    key, number = next(iter(settings)), draw.number(10_000, 99_999)
    phrases = (
        "Set {k} to {n} in {f}.",
        "Change the value of {k} in {f} to {n}.",
        "In {f}, the number of {k} should be {n}. Edit it.",
        "Edit {f} so that {k} is {n}, and keep the rest.",
    )
    before = dict(draw.shuffled(list(settings.items())))
    return Scene(
        instruction=draw.say(phrases, k=key, n=number, f=source),
        files={source: _json_lines(before), **draw.clutter()},
        changed=(source,),
        commands=(f"sed -i '/\"{key}\"/s/[0-9][0-9]*/{number}/' {source}",),
        checks=(is_json(source, json.dumps({**before, key: number})),),
        cheat=f"echo '{{\"{key}\": {number}}}' > {source}",
        image=IMAGE,
    )


def _json_rename_key(draw: Draw) -> Scene:
    source, settings = draw.file("json"), _settings(draw)
    old, new = draw.one_of(list(settings)), draw.thing()
    phrases = (
        "Rename the key {k} to {n} in {f}.",
        "The key {k} in {f} should be called {n}. Its value stays.",
        "In the JSON file {f}, change the name of {k} to {n}.",
    )
    return Scene(
        instruction=draw.say(phrases, k=old, n=new, f=source),
        files={source: _json_lines(settings), **draw.clutter()},
        changed=(source,),
        commands=(f'sed -i \'s/"{old}":/"{new}":/\' {source}',),
        checks=(is_json(source, json.dumps({new if key == old else key: settings[key] for key in settings})),),
        cheat=f"echo '\"{new}\": 1' >> {source}",
        image=IMAGE,
    )


def _json_drop_key(draw: Draw) -> Scene:
    source, settings = draw.file("json"), _settings(draw)
    # Not the last: then the comma before it would have to go too, which is another task.
    key = draw.one_of(list(settings)[:-1])
    phrases = (
        "Remove {k} with its value from {f}. The file must stay valid JSON.",
        "Delete the key {k} from the JSON file {f} and keep the others.",
        "{f} shouldn't have {k} any more. Take the key and its value out.",
    )
    return Scene(
        instruction=draw.say(phrases, k=key, f=source),
        files={source: _json_lines(settings), **draw.clutter()},
        changed=(source,),
        commands=(f"sed -i '/\"{key}\"/d' {source}",),
        checks=(is_json(source, json.dumps({name: settings[name] for name in settings if name != key})),),
        cheat=f"echo '{{}}' > {source}",
        image=IMAGE,
    )


def _json_count(draw: Draw) -> Scene:
    source, target = draw.file("json"), draw.file("txt")
    people, wanted = draw.rng.sample(PEOPLE, draw.number(5, 8)), draw.number(2, 4)
    flags = draw.shuffled([True] * wanted + [False] * (len(people) - wanted))
    entries = [{"name": name, "active": flag} for name, flag in zip(people, flags, strict=True)]
    phrases = (
        "{f} is a list of people. Count those whose active is true and write the number to {g}.",
        "How many entries of {f} have active set to true? Save the number as {g}.",
        "Write to {g} how many people in {f} are active.",
    )
    return Scene(
        instruction=draw.say(phrases, f=source, g=target),
        files={source: _json_lines(entries)},
        commands=(f"grep -c '\"active\": true' {source} > {target}",),
        checks=(answers(target, wanted),),
        cheat=f"grep -c active {source} > {target}",
        image=IMAGE,
    )


CSV: Final[Kind] = {
    "easy": (_csv_header, _csv_column, _csv_rows),
    "medium": (_csv_extreme,),
    "hard": (_csv_sum, _csv_sort),
}
JSON: Final[Kind] = {
    "easy": (_json_get,),
    "medium": (_json_get_word, _json_set, _json_count),
    "hard": (_json_rename_key, _json_drop_key),
}
