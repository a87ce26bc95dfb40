"""Tasks with version control: the kind `git`."""

from __future__ import annotations

from typing import Final

from thundersyncrl.environments.shell_tasks.checks import git_says, holds, is_folder
from thundersyncrl.environments.shell_tasks.git_objects import MAIN, Commit, Repository
from thundersyncrl.environments.shell_tasks.scene import Kind, Scene
from thundersyncrl.environments.shell_tasks.words import ANIMALS, FRUITS, TOOLS, Draw

IMAGE: Final = "python:3.12-bookworm"
"""A plain image that has git, unlike Debian's own."""
# The agent needs no identity and no settings of its own; the container's user needn't own the folder.
VARIABLES: Final = {
    "GIT_AUTHOR_NAME": "Agent",
    "GIT_AUTHOR_EMAIL": "agent@example.com",
    "GIT_COMMITTER_NAME": "Agent",
    "GIT_COMMITTER_EMAIL": "agent@example.com",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "init.defaultBranch",
    "GIT_CONFIG_VALUE_1": MAIN,
}


def _history(draw: Draw) -> list[Commit]:
    """Two commits of two files."""
    one, other = draw.files(2, "txt")
    first = {one: draw.text()}
    return [
        Commit(files=first, message=f"Add {one}"),
        Commit(files={**first, other: draw.text()}, message=f"Add {other}"),
    ]


def _message(draw: Draw) -> str:
    return f"{draw.one_of(('add', 'fix', 'change', 'update'))} {draw.word()}"


def _init(draw: Draw) -> Scene:
    folder = draw.folder()
    name, content = f"{folder}/{draw.file()}", draw.text()
    phrases = (
        "Make the folder {d} a git repository.",
        "Start a new git repository in {d}.",
        "Put {d} under version control with git; nothing needs to be committed.",
        "Initialize git in the folder {d}.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder),
        files={name: content},
        commands=(f"git init {folder}",),
        checks=(is_folder(f"{folder}/.git"), git_says(".git", "-C", folder, "rev-parse", "--git-dir")),
        cheat=f"mkdir {folder}/.git",
        image=IMAGE,
        variables=VARIABLES,
    )


def _branch(draw: Draw) -> Scene:
    repository, name, files = Repository(history := _history(draw)), draw.thing(), history[-1].files
    phrases = (
        "Create a git branch {b}, but stay on the branch you are on.",
        "Add a branch named {b} to this git repository without switching to it.",
        "This git repository needs a branch {b}. Don't check it out.",
    )
    return Scene(
        instruction=draw.say(phrases, b=name),
        files=files,
        repository=repository.content,
        commands=(f"git branch {name}",),
        checks=(
            git_says(repository.commits[-1], "rev-parse", "--verify", f"refs/heads/{name}"),
            git_says(MAIN, "symbolic-ref", "--short", "HEAD"),
        ),
        cheat=f"git checkout -b {name}",
        image=IMAGE,
        variables=VARIABLES,
    )


def _switch(draw: Draw) -> Scene:
    repository, name, files = Repository(history := _history(draw)), draw.thing(), history[-1].files
    phrases = (
        "Create a git branch {b} and switch to it.",
        "Make a new branch {b} in this git repository and check it out.",
        "Start a branch {b} with git and go on working on it.",
    )
    return Scene(
        instruction=draw.say(phrases, b=name),
        files=files,
        repository=repository.content,
        commands=(f"git checkout -b {name}",),
        checks=(
            git_says(repository.commits[-1], "rev-parse", "--verify", f"refs/heads/{name}"),
            git_says(name, "symbolic-ref", "--short", "HEAD"),
        ),
        cheat=f"git branch {name}",
        image=IMAGE,
        variables=VARIABLES,
    )


def _commit(draw: Draw) -> Scene:
    repository, files = Repository(history := _history(draw)), history[-1].files
    name, content, message = draw.file(), draw.text(), _message(draw)
    phrases = (
        'Commit the new file {f} with the message "{m}".',
        'The file {f} isn\'t in git yet. Commit it as "{m}".',
        'Add {f} to the git repository, with the commit message "{m}".',
    )
    return Scene(
        instruction=draw.say(phrases, f=name, m=message),
        files={**files, name: content},
        repository=repository.content,
        commands=(f'git add {name} && git commit -m "{message}"',),
        checks=(
            git_says(repository.commits[-1], "rev-parse", "HEAD^"),
            git_says(message, "log", "-1", "--no-show-signature", "--format=%B"),
            git_says(content.decode().rstrip("\n"), "cat-file", "-p", f"HEAD:{name}"),
            git_says("\n".join(sorted([*files, name])), "ls-tree", "--name-only", "HEAD"),
        ),
        cheat=f'git commit --allow-empty -m "{message}"',
        image=IMAGE,
        variables=VARIABLES,
    )


def _tag(draw: Draw) -> Scene:
    repository, files = Repository(history := _history(draw)), history[-1].files
    name = f"v{draw.number(1, 9)}.{draw.number(0, 9)}"
    phrases = (
        "Tag the newest commit as {t}.",
        "Put a git tag {t} on the current commit.",
        "Mark the last commit with the tag {t}.",
    )
    return Scene(
        instruction=draw.say(phrases, t=name),
        files=files,
        repository=repository.content,
        commands=(f"git tag {name}",),
        checks=(git_says(repository.commits[-1], "rev-parse", "--verify", f"refs/tags/{name}^{{commit}}"),),
        cheat=f"git branch {name}",
        image=IMAGE,
        variables=VARIABLES,
    )


def _restore(draw: Draw) -> Scene:
    repository, files = Repository(history := _history(draw)), history[-1].files
    name = draw.one_of(list(files))
    phrases = (
        "Somebody spoilt {f}. Bring back the version that is in git.",
        "Undo the changes of {f} that aren't committed.",
        "Reset the file {f} to its state in the last commit.",
    )
    return Scene(
        instruction=draw.say(phrases, f=name),
        files={**files, name: draw.text()},
        changed=(name,),
        repository=repository.content,
        commands=(f"git checkout {name}",),
        checks=(holds(name, files[name]), git_says(repository.commits[-1], "rev-parse", "HEAD")),
        cheat=f"git add {name} && git commit -m restore",
        image=IMAGE,
        variables=VARIABLES,
    )


def _switch_to_described(draw: Draw) -> Scene:
    repository, files = Repository(history := _history(draw)), history[-1].files
    branches = {"an animal": draw.word(ANIMALS), "a fruit": draw.word(FRUITS), "a tool": draw.word(TOOLS)}
    for name in branches.values():
        repository.add_branch(name)
    category, name = draw.one_of(list(branches.items()))
    phrases = (
        "Switch to the git branch that is named after {c}.",
        "One git branch here has the name of {c}. Check it out.",
        "Look at the branches of this git repository and check out the one called like {c}.",
    )
    return Scene(
        instruction=draw.say(phrases, c=category),
        files=files,
        repository=repository.content,
        commands=("git branch", f"git checkout {name}"),
        checks=(
            git_says(name, "symbolic-ref", "--short", "HEAD"),
            git_says(repository.commits[-1], "rev-parse", "--verify", f"refs/heads/{name}"),
        ),
        cheat="git checkout -b branch",
        hidden=(name,),
        image=IMAGE,
        variables=VARIABLES,
    )


def _bring_back(draw: Draw) -> Scene:
    lost, kept, changed = draw.files(3, "txt")
    before = {lost: draw.text(), kept: draw.text(), changed: draw.text()}
    after = {kept: before[kept], changed: draw.text()}
    history = [Commit(files=before, message="Add texts"), Commit(files=after, message="Change texts")]
    phrases = (
        "The last git commit deleted a file. Bring just that file back, as it was, and keep all else.",
        "The newest commit deleted some file. Get it back from git, but leave the other files alone.",
        "Find out which file the last commit removed and restore it; don't touch the other files.",
    )
    return Scene(
        instruction=draw.say(phrases),
        files=after,
        repository=Repository(history).content,
        commands=("git log -1 --name-status", f"git checkout HEAD~1 -- {lost}"),
        checks=(holds(lost, before[lost]),),
        cheat="git checkout HEAD~1 -- .",
        hidden=(lost,),
        image=IMAGE,
        variables=VARIABLES,
    )


GIT: Final[Kind] = {
    "easy": (_init, _branch, _switch),
    "medium": (_commit, _tag, _restore),
    "hard": (_switch_to_described, _bring_back),
}
