"""What the site has beside the pages in docs/: pages of other folders, the command line, the Python interface, and
formulas that a browser shows without a script."""

import os
import re
from collections.abc import Iterator
from functools import partial
from html import unescape
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
HOME = "README.md", "index.md"
ELSEWHERE = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md")
"""Pages that stand where somebody looks for them who has the repository."""
LINK = re.compile(r"(!?\[([^\]]*)\]\()([^)#\s]*)((?:#[^)]*)?\))")
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.M | re.S)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """In the navigation each method's page, each paper's, below those of all, and each example's."""
    pages = sorted(path.name for path in (ROOT / "docs" / "methods").glob("*.md") if path.name != "README.md")
    parts = {name: entries for part in config.nav or [] for name, entries in part.items()}
    parts["Reference"].insert(3, {"Methods": ["methods/README.md", *(f"methods/{name}" for name in pages)]})
    papers = sorted(path.name for path in (ROOT / "docs" / "results").glob("*.md"))
    parts["Explanation"].insert(1, {"Paper by paper": [f"results/{name}" for name in papers]})
    notes = sorted(path.name for path in (ROOT / "docs" / "notes").glob("*.md"))
    parts["Explanation"].insert(2, {"Notes": [f"notes/{name}" for name in notes]})
    parts["Start"].append({"Examples": list(map(_name, sorted(ROOT.glob("examples/*/README.md"))))})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages from outside of docs/, under their own paths, and the made ones."""
    outside = {path: path for path in ELSEWHERE}
    outside |= {path: path for path in map(_name, sorted(ROOT.glob("examples/*/README.md")))}
    for path, place in {**outside, HOME[0]: HOME[1]}.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=_moved(text, path, place)))
    for page in files.documentation_pages():
        if page.src_uri not in {*outside, HOME[1]} and page.abs_src_path:
            text = Path(page.abs_src_path).read_text(encoding="utf-8")
            files.remove(page)
            moved = _moved(text, f"docs/{page.src_uri}", page.src_uri)
            files.append(File.generated(config, page.src_uri, content=moved))
    files.append(File.generated(config, "reference/command-line.md", content="".join(_commands())))
    files.append(File.generated(config, "reference/python.md", content="".join(_interface())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, but in code; on a method's page its settings, too."""
    if page.file.src_uri.startswith("methods/") and "\n## Hyper-parameters\n" in markdown:
        before, heading, after = markdown.partition("\n## Hyper-parameters\n")
        said, end, rest = after.partition("\n## ")
        markdown = before + heading + said + _settings(PurePosixPath(page.file.src_uri).name) + end + rest
    parts = CODE.split(markdown)
    parts[::2] = [FORMULA.sub(_formula, part) for part in parts[::2]]
    return "".join(parts)


def _formula(found: re.Match[str]) -> str:
    block, inline = found.groups()
    text = re.sub(r"\\tag\{([^}]*)\}", r"\\qquad (\1)", " ".join((block or inline).split()))
    made = convert(unescape(text), display="block" if block else "inline")
    return f"\n\n{made}\n\n" if block else made


def _settings(page: str) -> str:
    """Tables of the hyper-parameters of the methods that have a page, as `perennial show method` has them."""
    from perennial.common.methods import METHODS
    from perennial.server.cli.show import fields_of, limits

    index = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    names = re.findall(rf"\]\({re.escape(page)}\) `([\w-]+)` \|", index)
    text = ""
    for name in names:
        text += f"\n**`{name}`**\n\n| setting | default | what | more |\n|---|---|---|---|\n"
        code = getattr(METHODS[name], "CODE", {})
        for key, facts in fields_of(METHODS[name]).items():
            default = f"{facts.get('default', '')}" + (f"; with `preset=code` {code[key]}" if key in code else "")
            more = "; ".join(f"{own}: {value}" for own, value in limits(facts).items())
            text += f"| `{key}` | {_cell(default)} | {_cell(facts.get('description', ''))} | {_cell(more)} |\n"
    return text + "\n"


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _moved(text: str, path: str, place: str) -> str:
    """A page whose relative links lead to the same pages from its place in the site; others lose their link."""
    return LINK.sub(partial(_link, PurePosixPath(path).parent, PurePosixPath(place).parent), text)


def _link(folder: PurePosixPath, place: PurePosixPath, found: re.Match[str]) -> str:
    before, text, target, after = found.groups()
    if not target or "://" in target:
        return found[0]
    there = normpath(os.path.join(folder, target))
    if (ROOT / there).is_dir() and (ROOT / there / "README.md").is_file():
        there = f"{there}/README.md"
    if there == HOME[0]:
        there = HOME[1]
    elif there.startswith("docs/"):
        there = there.removeprefix("docs/")
    elif there not in ELSEWHERE and not re.fullmatch(r"examples/[^/]+/README\.md", there):
        return text
    return f"{before}{relpath(there, place)}{after}"


def _commands() -> Iterator[str]:
    """What each command says of itself."""
    import click
    from typer.main import get_command

    from perennial.server.cli.main import app

    yield "# The command line\n\n"
    yield "*For people who look for a command's options. `perennial COMMAND --help` says the same.*\n\n"
    root = get_command(app)

    def told(command: click.Command, name: str, above: click.Context | None) -> Iterator[str]:
        context = click.Context(command, info_name=name, parent=above, max_content_width=100, terminal_width=100)
        if isinstance(command, click.Group):
            for own in command.list_commands(context):
                if (found := command.get_command(context, own)) and not found.hidden:
                    yield from told(found, own, context)
            return
        yield f"## {context.command_path}\n\n{(command.help or '').strip()}\n\n"
        yield "| option | what it is | default |\n|---|---|---|\n"
        for parameter in command.get_params(context):
            yield _row(parameter, context)
        yield "\n"

    yield from told(root, "perennial", None)


def _row(parameter: Any, context: Any) -> str:
    if getattr(parameter, "hidden", False):
        return ""
    kind = parameter.make_metavar(context) if parameter.param_type_name == "argument" else parameter.type.name
    options = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    names = f"`{kind}`" if parameter.param_type_name == "argument" else options
    if parameter.param_type_name == "option" and not parameter.is_flag:
        choices = getattr(parameter.type, "choices", None)
        names += f" *{' or '.join(map(str, choices)) if choices else kind}*"
    default = parameter.default
    shown = "" if default is None or callable(default) or default in ((), [], False, "") else f"`{default}`"
    text = " ".join((getattr(parameter, "help", None) or "").split())
    return f"| {names} | {_cell(text)} | {'required' if parameter.required else shown} |\n".replace("\n|", "|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _interface() -> Iterator[str]:
    """The public names, from their docstrings."""
    import perennial

    yield "# The Python interface\n\n"
    yield "*For people who look for an argument. [From Python](../python.md) shows the use.*\n\n"
    for room, names in perennial.ROOMS.items():
        for name in names:
            yield f"::: perennial.{room}.{name}\n\n"
