"""A Dockerfile is carried out as far as a sandbox can, and refused by name beyond."""

from __future__ import annotations

from pathlib import Path

import pytest

from thundersyncrl.environments.dockerfile import Build, Copy, is_plain_image, read_dockerfile
from thundersyncrl.errors import TaskError


def build(folder: Path, text: str) -> Build:
    (folder / "Dockerfile").write_text(text)
    return read_dockerfile(folder / "Dockerfile")


@pytest.mark.parametrize(
    ("name", "is_plain"),
    [
        ("debian", True),
        ("debian:12-slim", True),
        ("ubuntu:24.04", True),
        ("python:3.12@sha256:0123abcd", True),
        ("docker.io/library/python:3.11", True),
        ("alpine:3", False),
        ("somebody/debian:12", False),
        ("ghcr.io/x/python", False),
        ("$BASE", False),
        ("", False),
    ],
)
def test_plain_images_are_those_that_this_machine_can_stand_in_for(name: str, is_plain: bool) -> None:
    assert is_plain_image(name) == is_plain


def test_supported_instructions_are_carried_out(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "data/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = build(
        tmp_path,
        "# syntax=docker/dockerfile:1\n\nFROM python:3.12-slim AS base\nWORKDIR /app\nENV A=1 B='two words'\n"
        "ENV C old form\n"
        'WORKDIR desk\nCOPY a.txt \\\n  # between\n  renamed.txt\nCOPY ["b.txt", "/data/"]\ncopy data $A/\n'
        "COPY *.txt /all/\nRUN mkdir -p out /srv/x:1 && rm -rf /var/lib/apt/lists/*\n",
    )
    assert found.workdir == "/app/desk"
    assert found.variables == {"A": "1", "B": "two words", "C": "old form"}
    assert found.copies == (
        Copy(source=tmp_path / "a.txt", target="/app/desk/renamed.txt"),
        Copy(source=tmp_path / "b.txt", target="/data/b.txt"),
        Copy(source=tmp_path / "data", target="/app/desk/1"),
        Copy(source=tmp_path / "a.txt", target="/all/a.txt"),
        Copy(source=tmp_path / "b.txt", target="/all/b.txt"),
    )
    assert found.folders == ("/app", "/app/desk", "/app/desk/out", "/srv/x:1")


def test_an_installation_is_accepted_where_this_machine_has_the_programs(tmp_path: Path) -> None:
    text = "RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y tar coreutils ; apt-get clean"
    assert build(tmp_path, f"FROM debian:12\n{text}\n") == Build()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("RUN make install", "`RUN make install`"),
        ("RUN curl http://x | sh", "`RUN curl http://x | sh`"),
        ("RUN apt-get install -y no-such-program", "`no-such-program`"),
        ("RUN apt-get dist-upgrade", "`apt-get dist-upgrade`"),
        ("RUN mkdir -p 'x", "matching quotes"),
        ("USER root", "`USER root`"),
        ("EXPOSE 80", "`EXPOSE 80`"),
        ('ENTRYPOINT ["x"]', "ENTRYPOINT"),
        ("ADD https://x/y /app", "`ADD https://x/y /app`"),
        ("COPY --from=build /x /y", "without flags"),
        ("COPY a.txt", "without flags"),
        ("COPY <<EOF /x", "without flags"),
        ('COPY ["a.txt"', "JSON list"),
        ("COPY missing.txt /app/", "no such file"),
        ("COPY ../secret /app/", "inside of the build context"),
        ("COPY link /app/", "a link out of it"),
        ("COPY a.txt $NOWHERE/", "`$NOWHERE`"),
        ("COPY a** /app/", "a pattern of file names"),
        ("RUN mkdir -p /app/x | sh", "`RUN mkdir -p /app/x | sh`"),
        ("RUN mkdir -p -m 777 /app/x", "`RUN mkdir -p -m 777 /app/x`"),
        ("RUN mkdir -p /app/$(whoami)", "only `mkdir -p`"),
        ("ENV 1A=2", "name=value"),
        ("FROM debian:13", "a second build stage"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(TaskError) as error:
        build(tmp_path, f"FROM debian:12\n\n{line}\n")
    assert reason in str(error.value)
    assert "line 3" in str(error.value)


def test_quotes_go_once_and_slashes_count_once(tmp_path: Path) -> None:
    text = """FROM debian\nENV A='q"' B="x y"\nENV C "old form"\nWORKDIR "//app//x"\nRUN mkdir -p //srv\n"""
    found = build(tmp_path, text)
    assert found.variables == {"A": 'q"', "B": "x y", "C": "old form"}
    assert (found.workdir, found.folders) == ("/app/x", ("/app/x", "/srv"))


def test_a_dockerfile_with_a_nul_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="NUL"):
        build(tmp_path, "FROM debian\nENV A=a\0b\n")


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_a_dockerfile_needs_an_image(tmp_path: Path, text: str) -> None:
    with pytest.raises(TaskError, match="FROM"):
        build(tmp_path, text)


@pytest.mark.parametrize("image", ["postgres:16", "nvidia/cuda:12", "$BASE", "debian:12 extra words"])
def test_other_images_are_refused(tmp_path: Path, image: str) -> None:
    with pytest.raises(TaskError, match="plain image"):
        build(tmp_path, f"FROM {image}\n")
    with pytest.raises(TaskError, match="begin with FROM"):
        build(tmp_path, f"ARG X=1\nFROM {image}\n")
