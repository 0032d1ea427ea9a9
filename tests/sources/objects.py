"""Objects that hold a number, and what the interpreter says; see table.py."""

# ruff: noqa: E501

from __future__ import annotations

from tests.sources.table import SET, Source, held, shared

#: Objects with a number in them, which the user replaces between steps.
OBJECTS = {
    "float": held("1.0", "self.x", SET),
    "int": held("1", "self.x", "opt.x = 1 + turn"),
    "bool": held("True", "(1.0 if self.x else 2.0)", "opt.x = bool(turn % 2)"),
    "complex": held("1j", "self.x.imag", "opt.x = (1 + turn) * 1j"),
    "text": held("'1'", "float(self.x)", "opt.x = str(1 + turn)"),
    "text-length": held("''", "1.0 + len(self.x)", "opt.x += 'x'"),
    "bytes": held("b'1'", "float(self.x[0])", "opt.x = bytes([1 + turn])"),
    "tuple": held("(1.0,)", "self.x[0]", "opt.x = (1.0 + turn,)"),
    "list": held("[1.0]", "self.x[0]", "opt.x[0] = 1.0 + turn"),
    "range": held("range(1)", "1.0 + len(self.x)", "opt.x = range(turn)"),
    "slice": held("slice(1)", "float(self.x.stop)", "opt.x = slice(1 + turn)"),
    "decimal": held(
        "decimal.Decimal('1.5')", "float(self.x)", "opt.x = decimal.Decimal(turn) + 1"
    ),
    "fraction": held(
        "fractions.Fraction(1, 3)",
        "float(self.x)",
        "opt.x = fractions.Fraction(1, 3 + turn)",
    ),
    "namespace": held(
        "types.SimpleNamespace(r=1.0)", "self.x.r", "opt.x.r = 1.0 + turn"
    ),
    "dataclass": Source(
        "self.x.r",
        "self.x = Held()",
        "opt.x.r = 1.0 + turn",
        around="@dataclasses.dataclass\nclass Held:\n    r: float = 1.0",
    ),
    "slots": Source(
        "self.x.r",
        "self.x = Held(); self.x.r = 1.0",
        "opt.x.r = 1.0 + turn",
        left="opt.x.r",
        around="class Held:\n    __slots__ = ('r',)",
    ),
    "named-tuple": Source(
        "self.x.r",
        "self.x = Held(1.0)",
        "opt.x = Held(1.0 + turn)",
        around="Held = collections.namedtuple('Held', 'r')",
    ),
    "enum": Source(
        "self.x.value",
        "self.x = Held.A",
        "opt.x = [Held.A, Held.B][turn % 2]",
        left="opt.x.name",
        around="class Held(enum.Enum):\n    A = 1.0\n    B = 2.0",
    ),
    "int-enum": Source(
        "float(self.x)",
        "self.x = Held.A",
        "opt.x = [Held.A, Held.B][turn % 2]",
        left="opt.x.name",
        around="class Held(enum.IntEnum):\n    A = 1\n    B = 2",
    ),
    "own-float": Source(
        "self.x",
        "self.x = Held(1.0)",
        "opt.x = Held(1.0 + turn)",
        around="class Held(float):\n    def __mul__(self, y): return 3.0 * y\n    __rmul__ = __mul__",
    ),
    "thread-local": held(
        "threading.local()", "getattr(self.x, 'r', 1.0)", "opt.x.r = 1.0 + turn"
    ),
    "context-variable": Source(
        "X.get()",
        before="X.set(1.0 + turn)",
        around="X = contextvars.ContextVar('x', default=1.0)",
    ),
    "weak-reference": Source(
        "self.x().r",
        "self.y = Held(); self.x = weakref.ref(self.y)",
        "opt.y.r = 1.0 + turn",
        around="class Held:\n    r = 1.0",
    ),
    "weak-value": Source(
        "self.x['y'].r",
        "self.y = Held(); self.x = weakref.WeakValueDictionary(y=self.y)",
        "opt.y.r = 1.0 + turn",
        left="opt.y.r",
        around="class Held:\n    r = 1.0",
    ),
    "partial": held(
        "functools.partial(float, 1.0)",
        "self.x()",
        "opt.x = functools.partial(float, 1.0 + turn)",
        left="opt.x.args",
    ),
    "module": Source(
        "X.r", before="X.r = 1.0 + turn", around="X = types.ModuleType('x'); X.r = 1.0"
    ),
    "module-getattr": Source(
        "X.r",
        left="len(SEEN)",
        around="SEEN = []\ndef asked(name):\n    if name != 'r': raise AttributeError(name)\n    SEEN.append(name)\n    return float(len(SEEN))\nX = types.ModuleType('x'); X.__getattr__ = asked",
    ),
    "global": Source("R", before="global R; R = 1.0 + turn", around="R = 1.0"),
    "globals": Source(
        "globals()['R']", before="global R; R = 1.0 + turn", around="R = 1.0"
    ),
    "modules": Source(
        "sys.modules[__name__].R", before="global R; R = 1.0 + turn", around="R = 1.0"
    ),
    "math-constant": shared("math.tau / 4", "math.tau = 1.0 + turn"),
    "class-attribute": Source(
        "self.r", before="type(opt).r = 1.0 + turn", setup="type(self).r = 1.0"
    ),
    "type-attribute": Source(
        "type(self).r", before="type(opt).r = 1.0 + turn", setup="type(self).r = 1.0"
    ),
    "base-attribute": Source("super().r", before="Base.r = 1.0 + turn"),
    "metaclass": Source(
        "Held.r",
        left="Held.n",
        around="class Meta(type):\n    n = 0\n    @property\n    def r(cls):\n        cls.n += 1\n        return float(cls.n)\nclass Held(metaclass=Meta): pass",
    ),
    "closure": Source(
        "self.x()",
        "self.x, self.y = cell()",
        "opt.y(1.0 + turn)",
        around="def cell():\n    r = 1.0\n    def get(): return r\n    def put(x):\n        nonlocal r\n        r = x\n    return get, put",
    ),
    "closure-counts": Source(
        "self.x()",
        "self.x = counting()",
        around="def counting():\n    n = 0.0\n    def count():\n        nonlocal n\n        n += 1.0\n        return n\n    return count",
    ),
    "default": Source(
        "drawn()",
        before="drawn.__defaults__ = (1.0 + turn,)",
        around="def drawn(r=1.0): return r",
    ),
    "keyword-default": Source(
        "drawn()",
        before="drawn.__kwdefaults__ = dict(r=1.0 + turn)",
        around="def drawn(*, r=1.0): return r",
    ),
    "function-attribute": Source(
        "drawn.r",
        before="drawn.r = 1.0 + turn",
        around="def drawn(): pass\ndrawn.r = 1.0",
    ),
    "function-replaced": Source(
        "drawn()",
        before="global drawn; drawn = [one, two][turn % 2]",
        around="def one(): return 1.0\ndef two(): return 2.0\ndrawn = one",
    ),
    "code-replaced": Source(
        "drawn()",
        before="drawn.__code__ = [one, two][turn % 2].__code__",
        around="def one(): return 1.0\ndef two(): return 2.0\ndef drawn(): return 0.0",
    ),
    "property-counts": Source(
        "self.rate",
        "self.n = 0.0",
        around="@property\ndef rate(self):\n    self.n += 1.0\n    return self.n\nBase.rate = rate",
    ),
    "property-of-another": Source(
        "self.x.rate",
        "self.x = Held()",
        around="class Held:\n    n = 0.0\n    @property\n    def rate(self):\n        self.n += 1.0\n        return self.n",
    ),
    "descriptor": Source(
        "self.rate",
        left="Base.__dict__['rate'].n",
        around="class Rate:\n    n = 0.0\n    def __get__(self, x, kind):\n        self.n += 1.0\n        return self.n\nBase.rate = Rate()",
    ),
    "method-patched": Source(
        "self.rate()",
        before="opt.rate = [one, two][turn % 2]",
        left="opt.rate.__name__",
        around="def one(): return 1.0\ndef two(): return 2.0\nBase.rate = lambda self: 3.0",
    ),
    "cached-property": Source(
        "self.rate",
        before="vars(opt).pop('rate', 0); opt.n = 1.0 + turn",
        setup="self.n = 1.0",
        around="class Rated(Base):\n    @functools.cached_property\n    def rate(self): return self.n\nBase = Rated",
    ),
    "lru-cache": Source(
        "drawn(2)",
        before="N[0] = 1.0 + turn; drawn.cache_clear()",
        left="str(drawn.cache_info())",
        around="N = [1.0]\n@functools.lru_cache\ndef drawn(x): return N[0]",
    ),
    "single-dispatch": Source(
        "drawn(2)",
        before="drawn.register(int, [one, two][turn % 2])",
        around="def one(x): return 1.0\ndef two(x): return 2.0\ndrawn = functools.singledispatch(one)",
    ),
    "by-name": held(
        "1.0", "getattr(self, self.y)", "opt.y = 'xz'[turn % 2]; opt.z = 5.0"
    ),
    "by-vars": held("1.0", "vars(self)['x']", SET),
    "by-dict": held("1.0", "self.__dict__['x']", SET),
    "by-getter": held("1.0", "operator.attrgetter('x')(self)", SET),
    "by-methodcaller": held(
        "[3.0]", "operator.methodcaller('count', 3.0)(self.x)", "opt.x.append(3.0)"
    ),
    "by-eval": held("1.0", "eval('self.x')", SET),
    "by-exec": held(
        "1.0", "(exec('y = self.x * 2', {}, y := dict(self=self)), y['y'])[1]", SET
    ),
    "by-format": held("1.0", "float(f'{self.x}')", SET),
    "by-sum": held("[1.0, 2.0]", "sum(self.x)", "opt.x.append(1.0)"),
    "by-hash": held("1", "hash(self.x) % 7", "opt.x = turn"),
    "by-sorted": held(
        "[3.0, 2.0]", "sorted(self.x)[0]", "opt.x.insert(0, 1.0 / (1 + turn))"
    ),
    "by-count": held("[1.0]", "float(self.x.count(1.0))", "opt.x.append(1.0)"),
    "by-contains": held(
        "[1.0]", "(1.0 if 3.0 in self.x else 2.0)", "opt.x.append(turn * 1.0)"
    ),
    "by-equality": held(
        "[1.0]", "(1.0 if self.x == [1.0, 1.0] else 2.0)", "opt.x.append(1.0)"
    ),
    "by-isinstance": held(
        "1.0", "(1.0 if isinstance(self.x, int) else 2.0)", "opt.x = [1, 1.0][turn % 2]"
    ),
    "defaults": Source("self.defaults['lr']", before="opt.defaults['lr'] = 0.1 + turn"),
    "group": Source(
        "group['x']",
        "self.param_groups[0]['x'] = 1.0",
        "opt.param_groups[0]['x'] = 1.0 + turn",
    ),
    "group-object": Source(
        "group['x'].r",
        "self.param_groups[0]['x'] = types.SimpleNamespace(r=1.0)",
        "opt.param_groups[0]['x'].r = 1.0 + turn",
    ),
    "parameter-attribute": Source(
        "getattr(p, 'r', 1.0)", before="PS[0].r = 1.0 + turn"
    ),
    "parameter-name": Source("float(len(p.name or ''))", before="pass"),
}

#: What the interpreter says of objects and of itself.
INTERPRETER = {
    "id": Source(
        "id(self.x) / 1e6", "self.x = []", low="id(opt.x) / 1e6", high="id(opt.x) / 1e6"
    ),
    "id-replaced": Source(
        "id(self.x) / 1e6",
        "self.x = object()",
        "opt.y = opt.x; opt.x = object()",
        low="id(opt.x) / 1e6",
        high="id(opt.x) / 1e6",
    ),
    "hash-text": shared("hash('fuseopt') % 97", "pass"),
    "hash-object": Source(
        "hash(self.x) / 1e6",
        "self.x = object()",
        "opt.y = opt.x; opt.x = object()",
        low="hash(opt.x) / 1e6",
        high="hash(opt.x) / 1e6",
    ),
    "repr-object": Source(
        "float(len(repr(self.x)))",
        "self.x = object()",
        low="len(repr(opt.x))",
        high="len(repr(opt.x))",
    ),
    "reference-count": Source(
        "float(sys.getrefcount(self.x))",
        "self.x = object(); self.y = []",
        "opt.y.append(opt.x)",
        low="sys.getrefcount(opt.x) - 0.5",
        high="sys.getrefcount(opt.x) + 0.5",
    ),
    "gc-count": Source("float(gc.get_count()[2])", low="0", high="1e6"),
    "gc-enabled": shared(
        "(1.0 if gc.isenabled() else 2.0)", "gc.enable() if turn % 2 else gc.disable()"
    ),
    "size-of": held("[]", "float(sys.getsizeof(self.x))", "opt.x.extend([1.0] * 9)"),
    "frame": shared("float(sys._getframe().f_code.co_argcount)", "pass"),
    "modules-count": shared(
        "float('fuseopt_test_x' in sys.modules)",
        "sys.modules.pop('fuseopt_test_x', 0) if turn % 2 else sys.modules.update(fuseopt_test_x=sys)",
    ),
    "thread-name": shared(
        "float(len(threading.current_thread().name))",
        "threading.current_thread().name = 'x' * (turn + 1)",
    ),
}
