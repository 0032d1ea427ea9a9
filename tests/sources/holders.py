"""Ways in which what holds a number hands it to a step; see table.py."""
# ruff: noqa: E501

from __future__ import annotations

from tests.sources.table import Source, held

#: Containers from which each read takes something away, or to which it adds.
CONSUMED = {
    "deque-popleft": held(
        "collections.deque(range(1, 99))", "self.x.popleft()", left="len(opt.x)"
    ),
    "deque-pop": held(
        "collections.deque(range(1, 99))", "self.x.pop()", left="len(opt.x)"
    ),
    "deque-rotate": held(
        "collections.deque([1.0, 2.0, 3.0])",
        "(self.x.rotate(1), self.x[0])[1]",
        left="[*opt.x]",
    ),
    "deque-appended": held(
        "collections.deque()",
        "(self.x.append(1.0), float(len(self.x)))[1]",
        left="len(opt.x)",
    ),
    "deque-bounded": held(
        "collections.deque([1.0, 2.0, 3.0], 3)",
        "(self.x.append(self.x[0] + 0.5), self.x[0])[1]",
        left="[*opt.x]",
    ),
    "bound-popleft": held(
        "collections.deque(range(1, 99)).popleft", "self.x()", left="opt.x()"
    ),
    "list-pop": held("[*range(1, 99)]", "self.x.pop()"),
    "list-pop-first": held("[*range(1, 99)]", "self.x.pop(0)"),
    "list-grows": held("[]", "(self.x.append(1.0), float(len(self.x)))[1]"),
    "list-grows-by-plus": held("[]", "(self.x.__iadd__([1.0]), float(len(self.x)))[1]"),
    "list-plus": Source(
        "grown(self.x)",
        "self.x = []",
        around="def grown(x):\n    x += [1.0]\n    return float(len(x))",
    ),
    "list-times": Source(
        "grown(self.x)",
        "self.x = [1.0]",
        "del opt.x[1:]",
        around="def grown(x):\n    x *= 2\n    return float(len(x) % 7)",
    ),
    "list-plus-of-operator": held(
        "[]", "(operator.iadd(self.x, [1.0]), float(len(self.x)))[1]"
    ),
    "list-insert": held("[]", "(self.x.insert(0, len(self.x)), self.x[0])[1]"),
    "list-remove": held(
        "[*range(1, 99)]", "(self.x.remove(min(self.x)), self.x[0])[1]"
    ),
    "list-delete": held("[*range(1, 99)]", "(self.x.__delitem__(0), self.x[0])[1]"),
    "list-sort": held(
        "[3.0]",
        "(self.x.sort(), self.x[0])[1]",
        "opt.x.append(2.0 / turn if turn else 4.0)",
    ),
    "list-reverse": held("[3.0, 2.0]", "(self.x.reverse(), self.x[0])[1]"),
    "list-slice": held(
        "[3.0, 2.0]", "(self.x.__setitem__(slice(0, 1), [self.x[0] + 1]), self.x[0])[1]"
    ),
    "set-or": Source(
        "grown(self.x)",
        "self.x = set()",
        around="def grown(x):\n    x |= {len(x)}\n    return float(len(x))",
    ),
    "set-discard": held(
        "set(range(99))", "(self.x.discard(len(self.x) - 1), float(len(self.x)))[1]"
    ),
    "dict-or": Source(
        "grown(self.x)",
        "self.x = {}",
        around="def grown(x):\n    x |= {len(x): 1.0}\n    return float(len(x))",
    ),
    "dict-update": held(
        "{}", "(self.x.update({len(self.x): 1.0}), float(len(self.x)))[1]"
    ),
    "dict-moved": held(
        "{1: 1.0, 2: 2.0, 3: 3.0}",
        "(self.x.__setitem__(next(iter(self.x)), self.x.pop(next(iter(self.x)))), next(iter(self.x.values())))[1]",
        left="[*opt.x]",
    ),
    "deque-plus": Source(
        "grown(self.x)",
        "self.x = collections.deque()",
        around="def grown(x):\n    x += [1.0]\n    return float(len(x))",
        left="len(opt.x)",
    ),
    "deque-extendleft": held(
        "collections.deque()",
        "(self.x.extendleft([len(self.x)]), self.x[0])[1]",
        left="[*opt.x]",
    ),
    "list-length-moved": held("[]", "1.0 + len(self.x)", "opt.x.append(1.0)"),
    "list-global": Source(
        "(X.append(1.0), float(len(X)))[1]", left="len(X)", around="X = []"
    ),
    "dict-popitem": held("{k: float(k) for k in range(1, 99)}", "self.x.popitem()[1]"),
    "dict-pop": held("{k: float(k) for k in range(1, 99)}", "self.x.pop(max(self.x))"),
    "dict-setdefault": held("{}", "self.x.setdefault(len(self.x), 1.0 + len(self.x))"),
    "ordered-popitem": held(
        "collections.OrderedDict((k, float(k)) for k in range(1, 99))",
        "self.x.popitem(last=False)[1]",
    ),
    "ordered-move": held(
        "collections.OrderedDict(a=1.0, b=2.0, c=3.0)",
        "(self.x.move_to_end(next(iter(self.x))), next(iter(self.x.values())))[1]",
        left="[*opt.x]",
    ),
    "set-pop": held("set(range(1, 99))", "self.x.pop()"),
    "set-add": held("set()", "(self.x.add(len(self.x)), float(len(self.x)))[1]"),
    "bytearray-pop": held(
        "bytearray(range(1, 99))", "self.x.pop()", left="bytes(opt.x)"
    ),
    "array-pop": held(
        "array.array('d', range(1, 99))", "self.x.pop()", left="len(opt.x)"
    ),
    "queue": held("filled(queue.Queue())", "self.x.get()", left="opt.x.qsize()"),
    "simple-queue": held(
        "filled(queue.SimpleQueue())", "self.x.get()", left="opt.x.qsize()"
    ),
    "heap": held("[*range(1, 99)]", "heapq.heappop(self.x)"),
    "counter": held(
        "collections.Counter()", "(self.x.update('a'), float(self.x['a']))[1]"
    ),
    "defaultdict-counts": held(
        "collections.defaultdict(itertools.count(1).__next__)",
        "float(self.x[KEY])",
        left="opt.x.default_factory()",
    ),
    "defaultdict-counts-keys": held(
        "collections.defaultdict(itertools.count(1).__next__)",
        "float(self.x[len(self.x)])",
        left="opt.x.default_factory()",
    ),
    "defaultdict-counts-group": Source(
        "float(group['x'][KEY])",
        "self.param_groups[0]['x'] = collections.defaultdict(itertools.count(1).__next__)",
        left="opt.param_groups[0]['x'].default_factory()",
    ),
    "defaultdict-counts-global": Source(
        "float(X[KEY])",
        left="X.default_factory()",
        around="X = collections.defaultdict(itertools.count(1).__next__)",
    ),
    "defaultdict-function": Source(
        "float(self.x[KEY])",
        "self.x = collections.defaultdict(made)",
        left="len(MADE)",
        around="MADE = []\ndef made():\n    MADE.append(0)\n    return len(MADE)",
    ),
    "defaultdict-list": held(
        "collections.defaultdict(list)",
        "1.0 + len(self.x[KEY])",
        "opt.x[2].append(turn)",
    ),
    "defaultdict-int": held("collections.defaultdict(int)", "1.0 + self.x[KEY]"),
    "defaultdict-float-counted": held(
        "collections.defaultdict(float)",
        "(self.x.__setitem__(KEY, self.x[KEY] + 1.0), self.x[KEY])[1]",
    ),
    "defaultdict-get": held(
        "collections.defaultdict(itertools.count(1).__next__)",
        "float(self.x.get(KEY, 2))",
        left="opt.x.default_factory()",
    ),
    "dict-missing": Source(
        "float(self.x[KEY])",
        "self.x = Missing()",
        left="opt.x.n",
        around="class Missing(dict):\n    n = 0\n    def __missing__(self, key):\n        self.n += 1\n        return self.n",
    ),
    "dict-own-get": Source(
        "float(self.x[KEY])",
        "self.x = Own({1: 1.0, 2: 2.0})",
        left="opt.x.n",
        around="class Own(dict):\n    n = 0\n    def __getitem__(self, key):\n        self.n += 1\n        return self.n",
    ),
    "user-dict": Source(
        "float(self.x[KEY])",
        "self.x = Own({1: 1.0, 2: 2.0})",
        left="opt.x.n",
        around="class Own(collections.UserDict):\n    n = 0\n    def __getitem__(self, key):\n        self.n += 1\n        return self.n",
    ),
    "chain-map": held(
        "collections.ChainMap({}, {1: 1.0, 2: 2.0})",
        "self.x[2]",
        "opt.x.maps[0][2] = 1.0 + turn",
    ),
    "mapping-proxy": held(
        "types.MappingProxyType(self.__dict__.setdefault('y', {2: 1.0}))",
        "self.x[2]",
        "opt.y[2] = 1.0 + turn",
    ),
}
FILLED = """
def filled(x):
    for k in range(1, 99):
        x.put(float(k))
    return x
"""

#: Memory that the user writes between steps.
MEMORY = {
    "array": held("array.array('d', [1.0])", "self.x[0]", "opt.x[0] = 1.0 + turn"),
    "memoryview": held(
        "memoryview(bytearray(b'\\x01'))",
        "float(self.x[0])",
        "opt.x[0] = 1 + turn",
        left="opt.x.tobytes()",
    ),
    "bytearray": held("bytearray(b'\\x01')", "float(self.x[0])", "opt.x[0] = 1 + turn"),
    "ctypes": held(
        "ctypes.c_double(1.0)",
        "self.x.value",
        "opt.x.value = 1.0 + turn",
        left="opt.x.value",
    ),
    "ctypes-array": held(
        "(ctypes.c_int * 2)(1, 2)",
        "float(self.x[1])",
        "opt.x[1] = 1 + turn",
        left="opt.x[1]",
    ),
    "ndarray-0d": held("np.array(1.0)", "float(self.x)", "opt.x[...] = 1.0 + turn"),
    "ndarray-item": held(
        "np.array([1.0, 2.0])", "self.x[1].item()", "opt.x[1] = 1.0 + turn"
    ),
    "ndarray-used": held("np.array([1.0, 2.0])", "self.x[1]", "opt.x[1] = 1.0 + turn"),
    "ndarray-float32": held(
        "np.array([0.1, 0.2], np.float32)", "float(self.x[1])", "opt.x[1] = 1.0 + turn"
    ),
    "ndarray-sum": held("np.ones(3)", "float(self.x.sum())", "opt.x[1] = 1.0 + turn"),
    "numpy-float64": held(
        "np.float64(1.0)", "self.x", "opt.x = np.float64(1.1 + turn)"
    ),
    "numpy-float32": held(
        "np.float32(0.1)", "self.x", "opt.x = np.float32(0.1 + turn)"
    ),
    "numpy-int64": held("np.int64(1)", "self.x", "opt.x = np.int64(1 + turn)"),
    "numpy-bool": held(
        "np.bool_(True)", "(1.0 if self.x else 2.0)", "opt.x = np.bool_(turn % 2)"
    ),
    "tensor-item": held(
        "torch.tensor(1.1)", "self.x.item()", "opt.x.fill_(1.1 + turn)"
    ),
    "tensor-float": held(
        "torch.tensor(1.1)", "float(self.x)", "opt.x.fill_(1.1 + turn)"
    ),
    "tensor-int": held("torch.tensor(3)", "int(self.x)", "opt.x.fill_(1 + turn)"),
    "tensor-f64": held(
        "torch.tensor(1.1, dtype=torch.float64)",
        "self.x.item()",
        "opt.x.fill_(1.1 + turn)",
    ),
    "tensor-list": held(
        "torch.tensor([1.1, 2.2])", "self.x.tolist()[1]", "opt.x.fill_(turn + 1)"
    ),
    "tensor-truth": held(
        "torch.tensor(True)", "(1.0 if self.x else 2.0)", "opt.x.fill_(turn % 2)"
    ),
    "tensor-numpy": held(
        "torch.tensor(1.1)", "float(self.x.numpy())", "opt.x.fill_(turn + 1.5)"
    ),
    "tensor-replaced": held(
        "torch.tensor(1.1)", "self.x.item()", "opt.x = torch.tensor(1.1 + turn)"
    ),
    "tensor-other-dtype": held(
        "torch.tensor(1.1)",
        "self.x.item()",
        "opt.x = torch.tensor(1.1 + turn, dtype=torch.float64 if turn % 2 else torch.float32)",
    ),
    "gradient-item": Source("float(p.grad.abs().max())"),
    "storage": held(
        "torch.tensor([1.1, 2.2])",
        "self.x.untyped_storage()[0] / 64",
        "opt.x.fill_(turn + 1)",
    ),
    "struct": held(
        "bytearray(8)",
        "struct.unpack('d', self.x)[0]",
        "struct.pack_into('d', opt.x, 0, 1.5 + turn)",
    ),
}
