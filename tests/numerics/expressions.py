"""Expressions of numbers that move. A step stores their values."""

EXPRESSIONS = r"""
3 in range(self.n)
self.n in range(2, 6)
self.n > 4
not self.n
self.n is None
self.n and 7
(self.n > 100) or self.n
int(self.n > 4)
bool(self.n)
(self.n > 4) + 1
max(self.n > 4, False)
[self.n in (3,4,5), self.n in [4], self.n in {5:1}]
(1, 2) < (1, self.n)
isinstance(self.n, int)
any(x == self.n for x in (4, 5))
all([self.n > 1, self.n > 5])
(3, 4, 5).count(self.n)
(self.n / 2).is_integer()
True & (self.n > 4)
(self.n > 4) ^ True
-(self.n > 4)
(self.n > 4) * 2.0
sum([self.n > 3, self.n > 4])
min(True, self.n > 3)
range(self.n)[1]
len(range(self.n))
range(self.n).count(3)
range(0, self.n, 2).index(2)
list(range(self.n))
divmod(self.n, 2)
self.n // True
self.n % 3 == 0
0 < self.n < 5
float(self.n) == self.n
self.n == 4.0
4 == self.n
self.n != 4
{self.n: 1}
{self.n, 3}
self.n.bit_length()
self.n.conjugate()
self.n.real
abs(self.n > 4)
round(self.n / 3, 1)
round(self.n / 3)
pow(self.n, 2)
pow(self.n, 2, 3)
self.n ** -1
self.n ** 0.5
self.n << 1
~self.n
self.n & 1
(self.n, self.n > 3)
slice(self.n)
complex(self.n)
str(self.n)
f"{self.n}"
f"{self.n > 3}"
repr(self.n > 3)
hash(self.n)
"a" * self.n
[0] * self.n
(1,) * (self.n > 3)
math.floor(self.n / 2)
math.ceil(self.n / 2)
math.isqrt(self.n)
math.gcd(self.n, 6)
math.sqrt(self.n)
math.isfinite(self.n)
math.isnan(self.n / 2)
math.copysign(1, self.n)
math.log2(self.n)
math.prod([self.n, True])
operator.truth(self.n)
operator.not_(self.n)
operator.contains((3, 4), self.n)
operator.index(self.n > 3)
float(self.n > 3)
bool(self.n > 3)
True if self.n > 3 else 0
(self.n > 3) is True
type(self.n > 3) is bool
type(self.n).__name__
isinstance(self.n > 3, bool)
sorted([self.n, 4, 2])
min(self.n, 4), max(self.n, 4)
[*map(bool, [self.n, 0])]
[*filter(None, [self.n, 0])]
dict(a=self.n > 3)
sum(x for x in range(self.n))
sum(range(self.n))
max(range(self.n))
[x for x in reversed(range(self.n))]
tuple(enumerate([self.n]))
[*zip([self.n], [self.n > 3])]
self.n.__eq__(4)
self.n.__lt__(4)
(4).__eq__(self.n)
self.n.__bool__()
self.n.__add__(1)
(self.n > 3).__and__(True)
int("5") == self.n
len([self.n]) == 1
self.n in [True, 4]
(self.n > 3) in [True]
(self.n > 3) == 1
[self.n, 3].index(3)
"b" in "ab"
self.n.to_bytes(2, "big")
functools.reduce(operator.or_, [self.n > 3, False])
functools.reduce(operator.add, [self.n > 3, self.n > 4])
int.from_bytes(b"a", "big") + self.n
bool(self.x)
self.x > 2
self.x.is_integer()
int(self.x)
self.x // 1
self.x % 1
self.x in (2.5, 3.5)
self.x == self.x
not self.x
max(self.x, self.n)
min(self.n, self.x)
max(3, self.x)
round(self.x)
round(self.x, 1)
int(self.x) in range(5)
math.trunc(self.x)
math.fsum([self.x, self.n])
math.hypot(self.x, self.n)
math.fmod(self.x, 2)
math.modf(self.x)
math.frexp(self.x)
self.x.hex()
divmod(self.x, 2)
self.x.as_integer_ratio()
self.x * (self.n > 3)
self.x or 0
self.x and True
self.x if self.x > 3 else self.n
self.n not in range(2, 6)
self.n in range(3, 12, 2)
self.n in range(7, 1, -2)
self.x in range(5)
self.x - 0.5 in range(5)
(self.n > 3) in range(1)
2.0 in range(self.n)
"a" in range(5)
None in range(self.n)
2.0 in range(5)
3 in range(self.n, 8)
1 if self.n in range(4) else 2.0
range(2, 6).count(self.n)
range(6).index(self.n - 3)
range(self.n) == range(4)
range(4).__contains__(self.n)
operator.contains(range(4), self.n)
self.n in reversed(range(5))
self.n in (x for x in (3, 5))
self.n in map(int, (3, 5))
self.n in {3, 5}
self.n in frozenset((3, 5))
self.n in {3: 1}.keys()
self.n in {1: 3}.values()
self.n in zip([3])
self.n in [self.n - 1, 4]
self.n in collections.deque([3, 4])
self.n in collections.OrderedDict({3: 4})
(self.n, 1) in [(3, 1), (4, 1)]
[self.n] == [4]
(self.n,) == (4,)
(self.n, 2) > (4, 1)
{self.n: 1} == {4: 1}
{3: 5, 4: 6}.get(self.n)
{3: 5, 4: 6}.get(self.n, 0)
[5, 6, 7, 8, 9, 10, 11, 12, 13][self.n]
"abcdefghijk"[self.n]
(1, 2, 3, 4, 5, 6, 7, 8, 9)[1:self.n]
range(10)[self.n]
range(10)[self.n:]
range(10)[::self.n]
[1, 2, 3].count(self.n)
self.n in (3.0, 5.0)
self.n in (True, False)
bool(range(self.n - 3))
len(range(2, self.n, 2))
next(iter(range(self.n, 9)))
any(range(self.n - 3))
dict.fromkeys(range(self.n - 1), 0)
[*range(self.n)][-1]
sum(1 for _ in range(self.n))
min(range(self.n, 9))
bytes(self.n)
bytearray(self.n)
chr(self.n + 60)
bin(self.n)
hex(self.n)
oct(self.n)
format(self.n, "03d")
"%d" % self.n
"{}".format(self.n)
str(self.n).zfill(3)
int(str(self.n))
float(str(self.x))
statistics.mean([self.n, self.x])
decimal.Decimal(self.n)
fractions.Fraction(self.n, 3)
bisect.bisect([3, 5, 7], self.n)
heapq.nlargest(1, [self.n, 4])
list(itertools.accumulate([self.n, 1]))
next(itertools.count(self.n))
list(itertools.repeat(self.n > 3, 2))
list(itertools.islice(range(100), self.n))
list(itertools.chain([self.n], [1]))
[*itertools.takewhile(lambda x: x < self.n, range(9))]
isinstance(self.n, (bool, float))
issubclass(type(self.n), int)
callable(self.n)
id(self.n) == id(self.n)
self.n is self.n
self.n == "4"
self.n is not None and self.n > 3
getattr(self, "n")
vars(self)["n"]
self.__dict__["n"] > 3
hasattr(self, "n")
type(self.n)(5)
type(self.x)(self.n)
copy.copy(self.n)
copy.deepcopy([self.n])
operator.itemgetter(1)([0, self.n])
operator.attrgetter("n")(self)
functools.partial(max, 4)(self.n)
(lambda n=self.n: n + 1)()
locals()["self"].n
format(self.n)
format(3, "03d")
format(self.x, ".3f")
format("a", ">3")
format(self.n > 3)
"%s %d" % (self.n, self.n)
"{:03d}".format(self.n)
str.format("{:03d}", self.n)
str.format("{}", 4)
f"{self.n:03d}"
f"{self.x:.1f}"
f"{self.n!r}"
"-".join([str(self.n)])
"a".join("bc") + str(self.n > 3)
""".strip().splitlines()
