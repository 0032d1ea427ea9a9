"""Ways in which Python hands a step a number, and what moves it between steps."""
# ruff: noqa: E501

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One way in which a step gets a number.

    `read`: the expression that the step evaluates; it may use `self`, `group` and `p`.
    `setup`: what `__init__` does. `before`: what the user does before each step, with
    `opt` and `turn`. `begin`: what is done at once before each of the two runs takes
    its step, for what both share. `left`: the state of the source after a step.
    `around`: lines at the top of the module.

    Where two runs cannot draw the same number, each number is compared with what is
    known of it: `low` and `high` are expressions of `opt`, evaluated before and after
    the step; `fresh` says that no two steps draw the same one.

    `dynamo`: why a step differs from eager as it does with Dynamo alone, "" if it must
    not.
    """

    read: str
    setup: str = "pass"
    before: str = "pass"
    begin: str = "pass"
    left: str = "None"
    around: str = ""
    low: str = ""
    high: str = ""
    fresh: bool = False
    dynamo: str = ""

    @property
    def live(self) -> bool:
        return bool(self.low or self.fresh)


def held(value: str, read: str, before: str = "pass", left: str = "None") -> Source:
    """Something in the attribute `x` of the optimizer."""
    return Source(read, f"self.x = {value}", before, left=left)


def rng(value: str, read: str) -> Source:
    return held(value, read, left="opt.x.getstate()")


def shared(read: str, begin: str, left: str = "None", around: str = "") -> Source:
    return Source(read, begin=begin, left=left, around=around)


NEXT = "next(self.x)"
SET = "opt.x = 1.0 + turn"

RANDOM = {
    "object-random": rng("random.Random(3)", "self.x.random()"),
    "object-uniform": rng("random.Random(3)", "self.x.uniform(0.5, 2.0)"),
    "object-randint": rng("random.Random(3)", "self.x.randint(1, 9)"),
    "object-randrange": rng("random.Random(3)", "self.x.randrange(1, 9)"),
    "object-gauss": rng("random.Random(3)", "self.x.gauss(0.0, 1.0)"),
    "object-choice": rng("random.Random(3)", "self.x.choice([0.5, 1.5, 2.5, 3.5])"),
    "object-shuffle": rng(
        "random.Random(3)", "(self.x.shuffle(y := [1, 2, 3, 4, 5]), y[0])[1]"
    ),
    "object-bits": rng("random.Random(3)", "self.x.getrandbits(4)"),
    "object-bytes": rng("random.Random(3)", "self.x.randbytes(1)[0]"),
    "object-branch": rng("random.Random(3)", "(1.0 if self.x.random() < 0.5 else 3.0)"),
    "object-int": rng("random.Random(3)", "int(self.x.random() * 10)"),
    "object-state": Source(
        "self.x.getstate()[1][0] % 97",
        "self.x = random.Random(3)",
        "opt.x.seed(turn)",
        left="opt.x.getstate()",
    ),
    "object-seeded": rng("random.Random(3)", "(self.x.seed(4), self.x.random())[1]"),
    "object-replaced": Source(
        "self.x.random()", "self.x = None", "opt.x = random.Random(turn)"
    ),
    "object-in-group": Source(
        "group['x'].random()",
        "self.param_groups[0]['x'] = random.Random(3)",
        left="opt.param_groups[0]['x'].getstate()",
    ),
    "object-in-list": Source(
        "self.x[0].random()", "self.x = [random.Random(3)]", left="opt.x[0].getstate()"
    ),
    "object-of-class": Source(
        "self.rng.random()",
        left="RNG.getstate()",
        around="RNG = random.Random(3)",
        setup="type(self).rng = RNG",
    ),
    "object-global": Source(
        "RNG.random()", left="RNG.getstate()", around="RNG = random.Random(3)"
    ),
    "object-closure": Source(
        "self.x()",
        "rng = random.Random(3); self.x = lambda: rng.random()",
        left="opt.x.__closure__[0].cell_contents.getstate()",
    ),
    "object-bound-method": held(
        "random.Random(3).random", "self.x()", left="opt.x.__self__.getstate()"
    ),
    "object-made-in-step": Source("random.Random(5).random()"),
    "object-made-unseeded": Source("random.Random().random()", fresh=True),
    "object-made-by-number": Source(
        "random.Random(self.x).random()", "self.x = 0", "opt.x = turn"
    ),
    "object-subclass": Source(
        "self.x.random()",
        "self.x = Mine(3)",
        left="opt.x.getstate()",
        around="class Mine(random.Random):\n    def random(self): return 0.5 + super().random()",
    ),
    "module-random": shared(
        "random.random()", "random.seed(turn)", "random.getstate()"
    ),
    "module-uniform": shared(
        "random.uniform(1.0, 2.0)", "random.seed(turn)", "random.getstate()"
    ),
    "module-randint": shared(
        "random.randint(1, 9)", "random.seed(turn)", "random.getstate()"
    ),
    "module-gauss": shared(
        "random.gauss(0.0, 1.0)", "random.seed(turn)", "random.getstate()"
    ),
    "module-two": shared(
        "random.random() - random.randint(1, 5)",
        "random.seed(turn)",
        "random.getstate()",
    ),
    "module-by-name": shared(
        "draw()",
        "random.seed(turn)",
        "random.getstate()",
        "from random import random as draw",
    ),
    "system-random": Source("random.SystemRandom().random()", fresh=True),
    "secrets": Source("secrets.randbelow(10**9) / 1e6", fresh=True),
    "urandom": Source("int.from_bytes(os.urandom(4), 'big') / 1e6", fresh=True),
    "uuid": Source("uuid.uuid4().int % 10**9 / 1e6", fresh=True),
    "numpy-generator": Source(
        "float(self.x.random())",
        "self.x = np.random.default_rng(3)",
        left="str(opt.x.bit_generator.state)",
    ),
    "numpy-module": shared(
        "float(np.random.random())",
        "np.random.seed(turn)",
        "str(np.random.get_state())",
    ),
    "numpy-state": Source(
        "float(self.x.rand())",
        "self.x = np.random.RandomState(3)",
        left="str(opt.x.get_state())",
    ),
    "torch-item": shared(
        "torch.rand(()).item()", "torch.manual_seed(turn)", "torch.get_rng_state()"
    ),
    "torch-tensor": shared(
        "float(torch.rand(()))", "torch.manual_seed(turn)", "torch.get_rng_state()"
    ),
    "torch-generator": Source(
        "torch.rand((), generator=self.x).item()",
        "self.x = torch.Generator().manual_seed(3)",
        left="opt.x.get_state()",
    ),
    "torch-randint": shared(
        "torch.randint(9, ()).item()",
        "torch.manual_seed(turn)",
        "torch.get_rng_state()",
    ),
    "torch-initial-seed": shared(
        "torch.initial_seed() % 97", "torch.manual_seed(1000 + 7 * turn)"
    ),
}

CLOCKS = {
    name: Source(read, low=read, high=read)
    for name, read in {
        "time": "time.time()",
        "time-ns": "time.time_ns() / 1e9",
        "monotonic": "time.monotonic()",
        "perf-counter": "time.perf_counter()",
        "process-time": "time.process_time()",
        "thread-time": "time.thread_time()",
        "gmtime": "time.mktime(time.gmtime()) + time.time() % 1",
        "datetime": "datetime.datetime.now().timestamp()",
        "os-times": "os.times().elapsed",
    }.items()
}

SYSTEM = {
    "environ-get": shared(
        "float(os.environ.get('FUSEOPT_TEST_X', '1'))",
        "os.environ['FUSEOPT_TEST_X'] = str(turn)",
    ),
    "environ-item": shared(
        "float(os.environ['FUSEOPT_TEST_X'])",
        "os.environ['FUSEOPT_TEST_X'] = str(turn)",
    ),
    "environ-in": shared(
        "(2.0 if 'FUSEOPT_TEST_X' in os.environ else 1.0)",
        "os.environ.pop('FUSEOPT_TEST_X', 0) if turn % 2 else os.environ.update(FUSEOPT_TEST_X='1')",
    ),
    "getenv": shared(
        "float(os.getenv('FUSEOPT_TEST_X', '1'))",
        "os.environ['FUSEOPT_TEST_X'] = str(turn)",
    ),
    "file": shared(
        "float(open(FILE).read())",
        "open(FILE, 'w').write(str(turn))",
        around="FILE = __file__ + '.txt'",
    ),
    "path": shared(
        "float(pathlib.Path(FILE).read_text())",
        "pathlib.Path(FILE).write_text(str(turn))",
        around="FILE = __file__ + '.txt'",
    ),
    "file-held": Source(
        "float(self.x.readline())",
        "open(FILE, 'w').write('1\\n2\\n3\\n' * 40); self.x = open(FILE)",
        left="opt.x.tell()",
        around="FILE = __file__ + '.txt'",
    ),
    "file-size": shared(
        "float(os.path.getsize(FILE))",
        "open(FILE, 'w').write('x' * turn)",
        around="FILE = __file__ + '.txt'",
    ),
    "text-io": Source(
        "float(self.x.readline())",
        "self.x = io.StringIO('1\\n2\\n3\\n' * 40)",
        left="opt.x.tell()",
    ),
    "pid": Source("float(os.getpid())", low="os.getpid()", high="os.getpid()"),
    "switch-interval": shared(
        "sys.getswitchinterval() * 100", "sys.setswitchinterval(0.005 + turn / 1024)"
    ),
    "recursion-limit": shared(
        "sys.getrecursionlimit() / 1000", "sys.setrecursionlimit(2000 + 1000 * turn)"
    ),
    "decimal-context": shared(
        "decimal.getcontext().prec / 10", "decimal.getcontext().prec = 20 + turn"
    ),
    "threads": shared("float(threading.active_count())", "pass"),
    "torch-threads": shared(
        "float(torch.get_num_threads())", "torch.set_num_threads(1 + turn % 2)"
    ),
    "log-level": shared(
        "float(logging.getLogger('x').level)", "logging.getLogger('x').setLevel(turn)"
    ),
    "warning-filters": shared("float(len(warnings.filters) % 7)", "pass"),
    "default-dtype": shared(
        "float(torch.get_default_dtype().itemsize)",
        "torch.set_default_dtype(torch.float64 if turn % 2 else torch.float32)",
    ),
}

ITERATORS = {
    "count": held("itertools.count(1)", NEXT, left="repr(opt.x)"),
    "list-iterator": held(
        "iter([*range(1, 99)])", NEXT, left="opt.x.__length_hint__()"
    ),
    "range-iterator": held("iter(range(1, 99))", NEXT, left="opt.x.__length_hint__()"),
    "tuple-iterator": held(
        "iter((*map(float, range(1, 99)),))", NEXT, left="opt.x.__length_hint__()"
    ),
    "dict-iterator": held(
        "iter({k: 0 for k in range(1, 99)})", NEXT, left="opt.x.__length_hint__()"
    ),
    "generator": held("(float(k) for k in range(1, 99))", NEXT, left="next(opt.x)"),
    "generator-send": Source(
        "self.x.send(2.0)",
        "self.x = adding(); next(self.x)",
        left="opt.x.send(0.0)",
        around="def adding():\n    n = 0.0\n    while True:\n        n += (yield n)",
    ),
    "cycle": held("itertools.cycle([1.0, 2.0, 3.0])", NEXT, left="next(opt.x)"),
    "map": held("map(float, range(1, 99))", NEXT, left="next(opt.x)"),
    "zip": held("zip(range(1, 99))", "next(self.x)[0]", left="next(opt.x)"),
    "enumerate": held("enumerate(range(99), 1)", "next(self.x)[0]", left="next(opt.x)"),
    "filter": held("filter(None, range(99))", NEXT, left="next(opt.x)"),
    "chain": held(
        "itertools.chain([1.0, 2.0], range(3, 99))", NEXT, left="next(opt.x)"
    ),
    "islice": held("itertools.islice(range(1, 99), 90)", NEXT, left="next(opt.x)"),
    "accumulate": held("itertools.accumulate(range(1, 99))", NEXT, left="next(opt.x)"),
    "repeat": held("itertools.repeat(2.0, 99)", NEXT, left="repr(opt.x)"),
    "next-default": held(
        "iter([1.0, 2.0])", "next(self.x, 5.0)", left="next(opt.x, 0)"
    ),
    "bound-next": held("itertools.count(1).__next__", "self.x()", left="opt.x()"),
    "callable-iterator": held(
        "iter(itertools.count(1).__next__, 99)", NEXT, left="next(opt.x)"
    ),
    "own-iterator": Source(
        NEXT,
        "self.x = Own()",
        left="opt.x.n",
        around="class Own:\n    n = 0\n    def __iter__(self): return self\n    def __next__(self):\n        self.n += 1\n        return float(self.n)",
    ),
    "iterator-in-group": Source(
        "next(group['x'])",
        "self.param_groups[0]['x'] = itertools.count(1)",
        left="repr(opt.param_groups[0]['x'])",
    ),
    "iterator-global": Source(
        "next(COUNT)", left="repr(COUNT)", around="COUNT = itertools.count(1)"
    ),
    "iterator-default": Source(
        "drawn()",
        left="repr(drawn.__defaults__)",
        around="def drawn(x=itertools.count(1)): return next(x)",
    ),
    "iterator-in-dict": held("{'x': itertools.count(1)}", "next(self.x['x'])"),
    "in-iterator": held(
        "iter(range(99))", "(1.0 if 3 in self.x else 2.0)", left="next(opt.x, 0)"
    ),
    "unpacked": held(
        "itertools.count(1)", "[*zip([0], self.x)][0][1]", left="repr(opt.x)"
    ),
}
