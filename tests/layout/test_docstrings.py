"""Each field of a public dataclass has a docstring of its own, below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.layout.support.source import PACKAGES, python_files, tree_of


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def undescribed(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the public fields in the body of a class without a text below them."""
    for node, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_") and not is_text(following):
                if "ClassVar" not in ast.unparse(node.annotation):
                    yield name


def is_public_dataclass(node: ast.ClassDef) -> bool:
    names = (one.func if isinstance(one, ast.Call) else one for one in node.decorator_list)
    return not node.name.startswith("_") and any(ast.unparse(one).rpartition(".")[2] == "dataclass" for one in names)


def test_each_field_of_a_public_dataclass_has_a_docstring() -> None:
    classes = [
        (name, node)
        for name in python_files(*PACKAGES)
        for node in tree_of(name).body
        if isinstance(node, ast.ClassDef) and is_public_dataclass(node)
    ]
    assert len(classes) > 200
    assert [f"{name}: {node.name}.{field}" for name, node in classes for field in undescribed(node.body)] == []


def test_a_field_without_one_is_found() -> None:
    source = '''
@dataclass(frozen=True)
class Size:
    """In pixels."""

    width: int
    height: int
    """Rows."""
    depth: int = 1

    _area: int = 0
    names: ClassVar[tuple[str, ...]] = ()
'''
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    assert is_public_dataclass(node)
    assert [*undescribed(node.body)] == ["width", "depth"]
