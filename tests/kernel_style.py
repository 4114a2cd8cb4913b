"""Rules over the source of Triton kernels that run on CUDA and on Ascend NPUs, by Python's `ast`.

`parse` reads a module; every rule of `RULES` takes what it gives and returns the violations, which is all
that a machine without an NPU can say about some of the hardware's habits. See test_kernel_style.py.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

GRID_HELPERS = {"cube_grid", "vector_grid"}
"""The functions that give a grid that every device can launch: one axis, 65,535 programs at most."""

DOTS = {"dot": "input", "dot_scaled": "lhs"}
"""The matrix products, and the keyword of the left operand of each."""

VIEWS = {"T", "cast", "expand_dims", "permute", "reshape", "to", "trans", "view"}
"""What may give the same memory back. `to` and `cast` do where the dtype is the same already."""

METADATA = {"dtype", "element_ty", "numel", "primitive_bitwidth", "scalar", "shape", "type"}
"""Attributes of tensors and pointers that are known when a kernel is compiled."""

FOLDED = {"cdiv", "constexpr", "isinstance", "len", "max", "min", "next_power_of_2"}
"""Functions that give a constexpr of constexprs."""

BLOCK_POINTERS = {
    "_experimental_make_tensor_descriptor",
    "advance",
    "load_tensor_descriptor",
    "make_block_ptr",
    "make_tensor_descriptor",
    "store_tensor_descriptor",
}
HOST_DESCRIPTORS = {"TensorDescriptor"}


class Violation(NamedTuple):
    """One breach of a rule."""

    line: int
    message: str


# Reading modules


def dotted(node: ast.AST) -> str:
    """`tl.math.exp` as text; empty for what is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return f"{start}.{node.attr}" if start else ""
    return ""


def of_language(node: ast.AST) -> str | None:
    """`dot` for `tl.dot`, `math.exp` for `tl.math.exp`, None for what does not belong to the language."""
    name = dotted(node)
    for start in ("tl.", "triton.language."):
        if name.startswith(start):
            return name.removeprefix(start)
    return None


def language_call(node: ast.AST) -> str | None:
    """The same of the function that a call calls."""
    return of_language(node.func) if isinstance(node, ast.Call) else None


def argument(call: ast.Call, place: int | None, name: str) -> ast.expr | None:
    """An argument, given by place (None: it has none) or by name."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return named or (call.args[place] if place is not None and place < len(call.args) else None)


def outside_functions(node: ast.AST, functions: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """What is below a node and not below one of the functions."""
    below = set(functions)
    waiting = list(ast.iter_child_nodes(node))
    while waiting:
        found = waiting.pop()
        if found not in below:
            yield found
            waiting.extend(ast.iter_child_nodes(found))


def decorators(function: ast.FunctionDef) -> set[str]:
    """The last names of the decorators, called or not."""
    nodes = (node.func if isinstance(node, ast.Call) else node for node in function.decorator_list)
    return {dotted(node).rpartition(".")[2] for node in nodes}


def is_jit(function: ast.FunctionDef) -> bool:
    """Decorated by a jit; or it calls the language, as what is compiled in some other way does."""
    if any(name.endswith("jit") for name in decorators(function)):
        return True
    inner = [
        node for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node is not function
    ]
    calls = {language_call(node) for node in outside_functions(function, inner)}
    return bool(calls - {None, *FOLDED})


@dataclass(frozen=True)
class Source:
    """A module: its tree, its own jit functions, and those it can call, by the names it calls them by."""

    tree: ast.Module
    functions: list[ast.FunctionDef]
    scope: dict[str, Callee] = field(repr=False)

    def called(self, node: ast.AST) -> Callee | None:
        """The jit function that a call calls, where it can be found."""
        return self.scope.get(dotted(node.func)) if isinstance(node, ast.Call) else None

    def host(self) -> Iterator[ast.AST]:
        """All that is outside the jit functions."""
        return outside_functions(self.tree, self.functions)


class Callee(NamedTuple):
    """A jit function and the module that it was written in."""

    source: Source
    function: ast.FunctionDef


def parse(text: str, modules: Mapping[str, str] | None = None) -> Source:
    """Read a module, and those of `modules` (name: text) that it imports jit functions from."""
    modules = modules or {}
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_jit(node)]
    source = Source(tree, functions, {})

    def add(target: str, start: str, only: str | None, name: str) -> None:
        # The text of a module that is being read is left out: imports may run in a circle.
        rest = {other: text for other, text in modules.items() if other != target}
        read = parse(modules[target], rest)
        for function in read.functions:
            if only in (None, function.name):
                source.scope[name or f"{start}.{function.name}"] = Callee(read, function)

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    add(alias.name, alias.asname or alias.name, None, "")
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = alias.asname or alias.name
                if f"{node.module}.{alias.name}" in modules:
                    add(f"{node.module}.{alias.name}", name, None, "")
                elif node.module in modules:
                    add(node.module, "", alias.name, name)
    source.scope.update({function.name: Callee(source, function) for function in functions})
    return source


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    """The parameters in order; Triton has no others."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def bound(call: ast.Call, function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """(parameter, argument) of a call, as far as they are written out."""
    names = [parameter.arg for parameter in parameters(function)]
    yield from zip(names, call.args, strict=False)
    for keyword in call.keywords:
        if keyword.arg in names:
            yield keyword.arg, keyword.value


def in_kernels(source: Source) -> Iterator[ast.AST]:
    """Every node of the jit functions' bodies."""
    for function in source.functions:
        for statement in function.body:
            yield from ast.walk(statement)


def stored(target: ast.AST) -> Iterator[ast.Name]:
    """The names that a target binds."""
    return (n for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


# What is known when a kernel is compiled


def is_constexpr(annotation: ast.expr | None) -> bool:
    """`tl.constexpr`, as text too."""
    if isinstance(annotation, ast.Constant):
        return str(annotation.value).endswith("constexpr")
    return annotation is not None and dotted(annotation).endswith("constexpr")


def is_unrolled(loop: ast.stmt) -> bool:
    """A loop whose index is a constexpr. That of `range` never is."""
    return isinstance(loop, ast.For) and language_call(loop.iter) == "static_range"


class Binding(NamedTuple):
    """One assignment to a name: the value (None: not to be told), and the ifs and loops around it."""

    value: ast.expr | None
    around: tuple[ast.stmt, ...]


@dataclass(frozen=True)
class Constants:
    """The names of a jit function that are known when it is compiled.

    `declared` are constexprs by annotation or as the index of a static_range, `known` also what is computed
    from those alone. A name from outside the function is a constant too: Triton allows no others.
    """

    source: Source
    local: frozenset[str]
    declared: frozenset[str]
    known: frozenset[str]

    def holds(self, node: ast.expr, known: frozenset[str] | None = None) -> bool:
        """An expression is made of constants only."""
        known = self.known if known is None else known
        match node:
            case ast.Name():
                return node.id in known or node.id not in self.local
            case ast.Attribute():
                return node.attr in METADATA or self.holds(node.value, known)
            case ast.Compare(ops=ops) if all(isinstance(op, ast.Is | ast.IsNot) for op in ops):
                return True  # `x is None` is answered by the compiler, whatever x is
            case ast.Call():
                called = [*node.args, *(keyword.value for keyword in node.keywords)]
                return self.folds(node.func, known) and all(self.holds(child, known) for child in called)
            case _:
                children = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
                return all(self.holds(child, known) for child in children)

    def folds(self, function: ast.expr, known: frozenset[str]) -> bool:
        """A call of this with constants gives a constant."""
        name = dotted(function)
        start, last = name.partition(".")[0], name.rpartition(".")[2]
        if last in FOLDED and start not in self.local:
            return True
        for node in self.source.host():
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return "constexpr_function" in decorators(node)
        # A method of a dtype, say. A function of a module gives a tensor for all that can be seen here.
        return (
            isinstance(function, ast.Attribute) and start in self.local and self.holds(function.value, known)
        )


def bindings(function: ast.FunctionDef) -> Iterator[tuple[str, Binding]]:
    """Every assignment in a function, but for those of constexpr annotations and of static_range."""
    for parameter in parameters(function):
        if not is_constexpr(parameter.annotation):
            yield parameter.arg, Binding(None, ())

    def visit(node: ast.AST, around: tuple[ast.stmt, ...]) -> Iterator[tuple[str, Binding]]:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from pairs(target, value, around)
            case ast.AnnAssign(target=target, value=value) if not is_constexpr(node.annotation):
                yield from pairs(target, value, around)
            case ast.NamedExpr(target=target, value=value):
                yield from pairs(target, value, around)
            case ast.AugAssign(target=target):
                yield from pairs(target, None, around)
            case ast.For(target=target) if not is_unrolled(node):
                yield from pairs(target, None, around)
            case ast.withitem(optional_vars=ast.expr() as target):
                yield from pairs(target, None, around)
        inside = (*around, node) if isinstance(node, ast.If | ast.For | ast.While) else around
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    def pairs(
        target: ast.expr, value: ast.expr | None, around: tuple[ast.stmt, ...]
    ) -> Iterator[tuple[str, Binding]]:
        match target, value:
            case ast.Tuple(elts=names), ast.Tuple(elts=values) if len(names) == len(values):
                for one, its in zip(names, values, strict=True):
                    yield from pairs(one, its, around)
            case _:
                single = isinstance(target, ast.Name)
                for name in stored(target):
                    yield name.id, Binding(value if single else None, around)

    for statement in function.body:
        yield from visit(statement, ())


def constants(source: Source, function: ast.FunctionDef) -> Constants:
    """The constants of a jit function: the least set that is closed under computing."""
    declared = {parameter.arg for parameter in parameters(function) if is_constexpr(parameter.annotation)}
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and is_constexpr(node.annotation):
            declared.update(name.id for name in stored(node.target))
        if isinstance(node, ast.For) and is_unrolled(node):
            declared.update(name.id for name in stored(node.target))
    found: dict[str, list[Binding]] = {}
    for name, binding in bindings(function):
        found.setdefault(name, []).append(binding)
    sure = frozenset(declared - set(found))
    known = Constants(source, frozenset(found) | sure, sure, sure)

    def static(statement: ast.stmt, known: Constants) -> bool:
        return known.holds(statement.test) if isinstance(statement, ast.If) else is_unrolled(statement)

    def constant(rows: list[Binding], known: Constants) -> bool:
        # Assigned twice, a name depends on which assignments run.
        ran = len(rows) == 1 or all(static(statement, known) for row in rows for statement in row.around)
        return ran and all(row.value is not None and known.holds(row.value) for row in rows)

    while True:
        more = {name for name, rows in found.items() if name not in known.known and constant(rows, known)}
        if not more:
            return known
        known = Constants(source, known.local, sure, known.known | more)


# The left operand of a dot


class Value(NamedTuple):
    """What one assignment gave a name: the last time that it ran, or some time before."""

    place: tuple[str, int, int]
    last: bool = True


Values = frozenset[Value]
NOTHING: Values = frozenset()


@dataclass
class Memory:
    """The values that each name may have, and those that a dot may have overwritten, with its line."""

    names: dict[str, Values]
    spent: dict[Value, int]

    def copy(self) -> Memory:
        """Another that can change alone."""
        return Memory(dict(self.names), dict(self.spent))

    def forget(self) -> None:
        """Drop what no name has any more."""
        alive = NOTHING.union(*self.names.values())
        self.spent = {value: line for value, line in self.spent.items() if value in alive}

    def renew(self, name: ast.Name) -> None:
        """Give a name a value of its own; what the same place gave before is now an old value."""
        new = Value((name.id, name.lineno, name.col_offset))
        old = new._replace(last=False)
        self.names.pop(name.id, None)
        self.forget()
        self.names = {
            other: frozenset(old if value == new else value for value in values)
            for other, values in self.names.items()
        }
        if new in self.spent:
            self.spent[old] = self.spent.pop(new)
        self.names[name.id] = frozenset({new})


def join(one: Memory, other: Memory) -> Memory:
    """Either of two."""
    names = {
        name: one.names.get(name, NOTHING) | other.names.get(name, NOTHING)
        for name in {**one.names, **other.names}
    }
    spent = dict(one.spent)
    for value, line in other.spent.items():
        spent[value] = min(line, spent.get(value, line))
    return Memory(names, spent)


class Effect(NamedTuple):
    """What a helper does: which parameters it spends, and which are in (each part of) its result."""

    spends: frozenset[str]
    returns: tuple[frozenset[str], ...]


class Operands:
    """A walk over one jit function in the order in which it runs, loops until nothing changes."""

    def __init__(
        self, source: Source, function: ast.FunctionDef, callers: tuple[ast.FunctionDef, ...] = ()
    ) -> None:
        self.source = source
        self.callers = (*callers, function)
        self.found: set[Violation] = set()
        self.spent: set[Value] = set()
        self.returned: list[list[Values]] = []
        self.jumps: list[Memory] = []
        self.parameters = {
            Value((parameter.arg, parameter.lineno, parameter.col_offset)): parameter.arg
            for parameter in parameters(function)
        }
        self.block(
            function.body, Memory({name: frozenset({value}) for value, name in self.parameters.items()}, {})
        )

    def effect(self) -> Effect:
        """The function as its callers see it."""

        def named(values: Values) -> frozenset[str]:
            return frozenset(self.parameters[value] for value in values if value in self.parameters)

        width = {len(parts) for parts in self.returned}
        if len(width) == 1:
            parts = [NOTHING.union(*rows) for rows in zip(*self.returned, strict=True)]
        else:
            parts = [NOTHING.union(*(values for parts in self.returned for values in parts))]
        return Effect(named(frozenset(self.spent)), tuple(named(values) for values in parts))

    # Statements; None for what is not reached

    def block(self, statements: list[ast.stmt], memory: Memory | None) -> Memory | None:
        """Statements, one after another."""
        for statement in statements:
            if memory is None:
                return None
            memory = self.statement(statement, memory)
        return memory

    def statement(self, node: ast.stmt, memory: Memory) -> Memory | None:
        """One statement. Changes the memory that it is given."""
        match node:
            case ast.Assign(targets=targets, value=value):
                values = self.read(value, memory)
                for target in targets:
                    self.store(target, values, memory)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.store(target, self.read(value, memory), memory)
            case ast.AugAssign(target=target, value=value):
                self.read(value, memory)
                if isinstance(target, ast.Name):
                    self.check(target, memory.names.get(target.id, NOTHING), memory)
                self.store(target, [NOTHING], memory)
            case ast.If(test=test, body=body, orelse=orelse):
                self.read(test, memory)
                ends = [self.block(body, memory.copy()), self.block(orelse, memory.copy())]
                reached = [end for end in ends if end is not None]
                return reduce(join, reached) if reached else None
            case ast.For(target=target, iter=over, body=body, orelse=orelse):
                self.read(over, memory)
                return self.block(orelse, self.loop(body, memory, lambda m: self.store(target, [NOTHING], m)))
            case ast.While(test=test, body=body, orelse=orelse):
                after = self.loop(body, memory, lambda m: self.read(test, m))
                self.read(test, after)
                return self.block(orelse, after)
            case ast.With(items=items, body=body):
                for item in items:
                    self.read(item.context_expr, memory)
                return self.block(body, memory)
            case ast.Return(value=value):
                self.returned.append(self.read(value, memory) if value else [NOTHING])
                return None
            case ast.Break() | ast.Continue():
                self.jumps.append(memory)
                return None
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.read(child, memory)
        return memory

    def loop(self, body: list[ast.stmt], memory: Memory, start: Callable[[Memory], object]) -> Memory:
        """A loop, run until another round brings nothing new."""
        outer, head = self.jumps, memory
        while True:
            self.jumps = []
            entered = head.copy()
            start(entered)
            end = self.block(body, entered)
            joined = reduce(join, [head, *self.jumps, *([end] if end is not None else [])])
            if joined == head:
                self.jumps = outer
                return head
            head = joined

    def store(self, target: ast.expr, values: list[Values], memory: Memory) -> None:
        """Bind names to values; to new ones where there are none."""
        if isinstance(target, ast.Name):
            known = NOTHING.union(*values)
            if known:
                memory.names[target.id] = known
                memory.forget()
            else:
                memory.renew(target)
        elif isinstance(target, ast.Tuple | ast.List):
            same = len(values) == len(target.elts)
            parts = values if same else [NOTHING.union(*values)] * len(target.elts)
            for one, its in zip(target.elts, parts, strict=True):
                self.store(one, [its], memory)

    # Expressions

    def check(self, node: ast.expr, values: Values, memory: Memory) -> None:
        """Use an expression that may be some of these values."""
        lines = [memory.spent[value] for value in values if value in memory.spent]
        if lines:
            name = ast.unparse(node)
            message = f"`{name}` is used after the dot of line {min(lines)}, which may have overwritten it"
            self.found.add(Violation(node.lineno, message))

    def operands(self, nodes: Iterable[ast.expr], memory: Memory) -> dict[ast.expr, list[Values]]:
        """Read all; then they are used: the a of `a + tl.dot(a, b)` is read before the dot, used after it."""
        read: dict[ast.expr, list[Values]] = {}
        fresh: dict[ast.expr, Values] = {}
        for node in nodes:
            read[node] = self.read(node, memory)
            fresh[node] = NOTHING.union(*read[node]) - set(memory.spent)
        for node, values in fresh.items():
            self.check(node, values, memory)
        return read

    def spend(self, values: Iterable[Values], line: int, memory: Memory) -> None:
        """Let a dot overwrite values."""
        for value in NOTHING.union(*values):
            memory.spent[value] = line
            self.spent.add(value)

    def read(self, node: ast.expr, memory: Memory) -> list[Values]:
        """Read an expression: which values it may be, each part of a tuple on its own."""
        match node:
            case ast.Name():
                values = memory.names.get(node.id, NOTHING)
                self.check(node, values, memory)
                return [values]
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return [NOTHING.union(*values) for values in self.operands(parts, memory).values()]
            case ast.Attribute(attr=attr) if attr in METADATA:
                return [NOTHING]
            case ast.Attribute(value=value, attr=attr):
                values = self.read(value, memory)
                return values if attr in VIEWS else [NOTHING]
            case ast.Subscript(value=value, slice=index):
                values = self.read(value, memory)
                self.read(index, memory)
                return [NOTHING.union(*values)]
            case ast.NamedExpr(target=target, value=value):
                values = self.read(value, memory)
                self.store(target, values, memory)
                return values
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.read(test, memory)
                other = memory.copy()
                values = [NOTHING.union(*self.read(body, memory), *self.read(orelse, other))]
                both = join(memory, other)
                memory.names, memory.spent = both.names, both.spent
                return values
            case ast.Call():
                return self.call(node, memory)
            case ast.Lambda():
                return [NOTHING]
            case _:
                children = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
                self.operands(children, memory)
                return [NOTHING]

    def call(self, node: ast.Call, memory: Memory) -> list[Values]:
        """Read the arguments, then let the function do what it does."""
        name = language_call(node)
        method = node.func if name is None and isinstance(node.func, ast.Attribute) else None
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        values = self.operands([method.value, *given] if method else given, memory)
        if name in DOTS:
            left = argument(node, 0, DOTS[name])
            self.spend(values.get(left, []) if left else [], node.lineno, memory)
        elif name in VIEWS:
            return values[given[0]] if given else [NOTHING]
        elif (callee := self.source.called(node)) and callee.function not in self.callers:
            effect = Operands(callee.source, callee.function, self.callers).effect()
            passed = dict(bound(node, callee.function))
            for parameter, its in passed.items():
                if parameter in effect.spends:
                    self.spend(values[its], node.lineno, memory)
            return [
                NOTHING.union(*(part for name in names if name in passed for part in values[passed[name]]))
                for names in effect.returns
            ]
        elif method and method.attr in VIEWS:
            return values[method.value]
        return [NOTHING]


def dot_operand_reused(source: Source) -> list[Violation]:
    """The left operand of a dot, or what may share its memory, is read before it is assigned anew."""
    return sorted(set().union(*(Operands(source, function).found for function in source.functions)))


# The other rules


def block_pointers(source: Source) -> list[Violation]:
    """Block pointers and tensor descriptors, made or moved."""
    inside = set(in_kernels(source))
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and (of_language(node) or node in inside):
            if node.attr in BLOCK_POINTERS:
                found.add(Violation(node.lineno, f"`{node.attr}`: pointer arithmetic and a mask instead"))
        elif isinstance(node, ast.Name) and node.id in BLOCK_POINTERS | HOST_DESCRIPTORS:
            found.add(Violation(node.lineno, f"`{node.id}`: pointer arithmetic and a mask instead"))
    return sorted(found)


def chained_booleans(source: Source) -> list[Violation]:
    """More than two operands at once; and any `and`, `or`, `not` of what is not a constant."""
    found = set()
    for function in source.functions:
        known = constants(source, function)
        for node in ast.walk(function):
            if isinstance(node, ast.Compare) and len(node.ops) > 1:
                found.add(Violation(node.lineno, "a chained comparison: compare two at a time, join by `&`"))
            if isinstance(node, ast.BoolOp):
                word = "and" if isinstance(node.op, ast.And) else "or"
                sign = "&" if word == "and" else "|"
                if len(node.values) > 2:
                    found.add(Violation(node.lineno, f"a chain of `{word}`: put two at a time in brackets"))
                if not known.holds(node):
                    message = f"`{word}` of what is known only at run time: `{sign}`, or one `if` in another"
                    found.add(Violation(node.lineno, message))
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and not known.holds(node):
                found.add(Violation(node.lineno, "`not` of what is known only at run time: compare instead"))
    return sorted(found)


def holds_dot(source: Source, node: ast.AST, callers: tuple[ast.FunctionDef, ...] = ()) -> bool:
    """There is a dot in this, or in what it calls."""
    for child in ast.walk(node):
        if language_call(child) in DOTS:
            return True
        callee = source.called(child)
        if callee and callee.function not in callers:
            within = (*callers, callee.function)
            if any(holds_dot(callee.source, statement, within) for statement in callee.function.body):
                return True
    return False


def runtime_if_around_dot(source: Source) -> list[Violation]:
    """A dot that is run or not as data say: in an `if` or a ternary, or after one that may leave."""
    found = set()

    def visit(node: ast.AST, later: list[ast.stmt], known: Constants) -> None:
        """`later`: what runs after this node, unless it leaves."""
        if isinstance(node, ast.If | ast.IfExp) and not known.holds(node.test):
            branches = [*node.body, *node.orelse] if isinstance(node, ast.If) else [node.body, node.orelse]
            if any(holds_dot(source, branch) for branch in branches):
                found.add(Violation(node.lineno, "a dot depends on a test that is made at run time"))
            leaves = any(
                isinstance(child, ast.Return | ast.Break | ast.Continue)
                for branch in branches
                for child in ast.walk(branch)
            )
            if leaves and any(holds_dot(source, statement) for statement in later):
                found.add(Violation(node.lineno, "a test at run time may leave before a dot"))
        for _, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            for place, child in enumerate(children):
                if isinstance(child, ast.AST):
                    after = [after for after in children[place + 1 :] if isinstance(after, ast.stmt)]
                    again = node.body if isinstance(node, ast.For | ast.While) else []
                    visit(child, [*after, *again, *later], known)

    for function in source.functions:
        visit(function, [], constants(source, function))
    return sorted(found)


def leftmost(node: ast.expr | None) -> str | None:
    """The name that an address starts from: `p` of `p + i * n`."""
    match node:
        case ast.Name():
            return node.id
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub()):
            return leftmost(left)
        case ast.IfExp(body=body):
            return leftmost(body)
        case ast.Call(func=ast.Attribute(value=owner, attr="to")):
            return leftmost(owner)
        case ast.Call(args=[first, *_]) if language_call(node) in ("cast", "max_contiguous", "multiple_of"):
            return leftmost(first)
    return None


def pointers(function: ast.FunctionDef) -> set[str]:
    """The names that hold pointers: by their names, by what they are computed from, by their use."""
    parts = [(name, leftmost(binding.value)) for name, binding in bindings(function)]
    found = {name for name, _ in parts if name.endswith("_ptr")}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and language_call(node) in ("load", "store"):
            found.add(leftmost(argument(node, 0, "pointer")) or "")
    before: set[str] = set()
    while before != found:
        before = set(found)
        for name, start in parts:
            if start and {name, start} & found:
                found |= {name, start}
    return found


def pointer_advanced(source: Source) -> list[Violation]:
    """A pointer that is moved under its own name, by `+=` or by `p = p + ...`."""
    found = set()
    for function in source.functions:
        names = pointers(function)
        for node in ast.walk(function):
            moved = None
            match node:
                case ast.AugAssign(target=ast.Name(id=name)):
                    moved = name
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    moved = name if not isinstance(value, ast.Name) and leftmost(value) == name else None
            if moved in names and isinstance(node, ast.stmt):
                found.add(Violation(node.lineno, f"`{moved}` is moved in place: give the sum its own name"))
    return sorted(found)


def raw_grids(source: Source) -> list[Violation]:
    """A launch whose grid does not come from one of GRID_HELPERS."""
    found = set()

    def grid(node: ast.expr, values: dict[str, list[Binding]]) -> bool:
        """A grid of a helper, or a name that is only ever that."""
        if isinstance(node, ast.Name) and node.id in values:
            return all(row.value is not None and grid(row.value, values) for row in values[node.id])
        return isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in GRID_HELPERS

    def launches(node: ast.Subscript, called: bool) -> bool:
        """`kernel[grid]`: of a known kernel always, of other lower-case names where it is called."""
        name = dotted(node.value)
        if name in source.scope:
            return True
        # A table of functions is no kernel, and neither is `list[int]()`.
        last = name.rpartition(".")[2]
        table = last.lstrip("_")[:1].isupper() or hasattr(builtins, last)
        return called and not (last and table)

    def search(scope: ast.Module | ast.FunctionDef, nodes: Iterable[ast.AST]) -> None:
        values: dict[str, list[Binding]] = {}
        if isinstance(scope, ast.FunctionDef):
            for name, binding in bindings(scope):
                values.setdefault(name, []).append(binding)
        nodes = list(nodes)
        called = {node.func for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if not isinstance(node, ast.Subscript) or not launches(node, node in called):
                continue
            if not grid(node.slice, values):
                found.add(Violation(node.lineno, f"a grid of {' or '.join(sorted(GRID_HELPERS))} instead"))

    hosts = [node for node in source.host() if isinstance(node, ast.FunctionDef)]
    search(source.tree, outside_functions(source.tree, [*source.functions, *hosts]))
    for function in hosts:
        inner = [node for node in (*source.functions, *hosts) if node is not function]
        search(function, outside_functions(function, inner))
    return sorted(found)


def masked_loads(source: Source) -> list[Violation]:
    """A load with a mask and without a value for what is masked."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and language_call(node) == "load":
            mask = argument(node, 1, "mask")
            masked = mask is not None and not (isinstance(mask, ast.Constant) and mask.value is None)
            if masked and argument(node, 2, "other") is None:
                found.add(Violation(node.lineno, "a masked load without `other=`"))
    return sorted(found)


def dot_precision(source: Source) -> list[Violation]:
    """A dot that leaves its precision to the compiler."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and language_call(node) == "dot":
            precision = argument(node, None, "input_precision")
            if precision is None or (isinstance(precision, ast.Constant) and precision.value is None):
                found.add(Violation(node.lineno, "a dot without `input_precision=`"))
    return sorted(found)


def constexpr_cast(source: Source) -> list[Violation]:
    """`.to` of a constexpr."""
    found = set()
    for function in source.functions:
        known = constants(source, function)
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr="to")):
                    if known.holds(owner, known.declared):
                        message = f"`{ast.unparse(owner)}` is a constexpr: `tl.cast`, not `.to`"
                        found.add(Violation(node.lineno, message))
    return sorted(found)


def forbidden_names(source: Source) -> list[Violation]:
    """float64, atomics and barriers."""
    reasons = {
        "float64": "no device of ours computes in it",
        "debug_barrier": "a kernel that needs it is wrong",
        "make_block_ptr": "gone from Triton 3.9",
    }
    inside = set(in_kernels(source))
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            if node.attr.startswith("atomic_") and (of_language(node) or node in inside):
                found.add(Violation(node.lineno, f"`{node.attr}`: the order of its sums is by chance"))
            elif of_language(node) and node.attr in reasons:
                found.add(Violation(node.lineno, f"`{node.attr}`: {reasons[node.attr]}"))
    return sorted(found)


def tasks(source: Source) -> list[Violation]:
    """program_id and num_programs anywhere but in `for ... in range(program_id(0), n, num_programs(0))`."""

    def first_axis(node: ast.expr, name: str) -> bool:
        axis = argument(node, 0, "axis") if isinstance(node, ast.Call) else None
        return language_call(node) == name and isinstance(axis, ast.Constant) and axis.value == 0

    allowed: set[ast.AST] = set()
    for node in in_kernels(source):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
            call = node.iter
            ranged = dotted(call.func) == "range" or language_call(call) == "range"
            if ranged and len(call.args) == 3:
                start, _, step = call.args
                if first_axis(start, "program_id") and first_axis(step, "num_programs"):
                    allowed |= {start, step}
    found = set()
    for node in ast.walk(source.tree):
        if language_call(node) in ("program_id", "num_programs") and node not in allowed:
            assert isinstance(node, ast.Call)
            message = f"`{ast.unparse(node)}` outside `range(tl.program_id(0), n, tl.num_programs(0))`"
            found.add(Violation(node.lineno, message))
    return sorted(found)


def language_is_tl(source: Source) -> list[Violation]:
    """The language under another name, or one of its functions under a name of its own."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "triton.language" and alias.asname not in (None, "tl"):
                    found.add(Violation(node.lineno, f"triton.language as `{alias.asname}`"))
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if f"{node.module}.{alias.name}" == "triton.language" and alias.asname != "tl":
                    found.add(Violation(node.lineno, f"triton.language as `{alias.asname or alias.name}`"))
                if f"{node.module}.".startswith("triton.language."):
                    found.add(Violation(node.lineno, f"`{alias.name}` without its `tl.`"))
    called = {node.func for node in ast.walk(source.tree) if isinstance(node, ast.Call)}
    watched = {*DOTS, "load", "store", "program_id", "num_programs"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and of_language(node) in watched and node not in called:
            found.add(Violation(node.lineno, f"`{dotted(node)}` is taken and not called"))
    return sorted(found)


class Rule(NamedTuple):
    """A rule and why it is one."""

    find: Callable[[Source], list[Violation]]
    reason: str


RULES = {
    "dot_operand_reused": Rule(dot_operand_reused, "an NPU may overwrite the left operand of a dot"),
    "block_pointers": Rule(block_pointers, "gone from Triton 3.9, and of 32-bit offsets on an NPU"),
    "chained_booleans": Rule(chained_booleans, "triton-ascend compiles two operands at a time"),
    "runtime_if_around_dot": Rule(runtime_if_around_dot, "the cube unit takes no branch that data decide"),
    "pointer_advanced": Rule(pointer_advanced, "one program runs many tasks: what is moved stays moved"),
    "raw_grids": Rule(raw_grids, "an NPU launches 65,535 programs at most"),
    "masked_loads": Rule(masked_loads, "what is masked is else whatever the memory held before"),
    "dot_precision": Rule(dot_precision, "the default is TF32 on one device and HF32 or IEEE on another"),
    "constexpr_cast": Rule(constexpr_cast, "a constexpr has no `.to`"),
    "forbidden_names": Rule(forbidden_names, "not on an NPU, or not the same result twice"),
    "tasks": Rule(tasks, "one 1-D grid of any size serves any number of tasks"),
    "language_is_tl": Rule(language_is_tl, "the rules above know the language by the name `tl`"),
}
"""The rules by name."""
