"""The seven families of problems.

Each generator takes (r, n), a random.Random and the number of units (steps), and returns (prompt, trace,
answer). Families in STYLED also take `long`: arithmetic with digit scratchpads. gen_color returns None when
it finds no instance that its search solves within the length asked for.

A trace follows from its prompt, apart from a few skewed wording choices (alt()), so a trained model has
almost no entropy on most tokens, while almost every step needs facts that stand far back in the context.

  prog    straight-line or repeated program over accumulators and far-away constants
  ledger  purchase events over account balances and far-away prices
  walk    parity-driven walk over a table of nodes (random access into the prompt)
  bfs     breadth-first search with a numbered queue and a path read-back
  color   graph 3-colouring with chronological backtracking
  bucket  bucket sort by repeated scans of the input list
  addl    long column additions with digit scratchpads
"""

from tokens import NAMES


def alt(r, main, others, p=0.1):
    return main if r.random() >= p else r.choice(others)


def calc(op, a, b, long):
    """a op b modulo 100, short or with a digit-wise scratchpad; returns (text, result)."""
    v = (a + b) % 100 if op == "+" else (a - b) % 100
    if not long:
        return f"{a:02d} {op} {b:02d} = {v:02d}", v
    a1, a0, b1, b0 = a // 10, a % 10, b // 10, b % 10
    if op == "+":
        s0 = a0 + b0
        s1 = a1 + b1 + s0 // 10
        t = f"ones {a0} + {b0} = {s0:02d} , tens {a1} + {b1} + {s0 // 10} = {s1:02d}"
    else:
        c = int(a0 < b0)
        d = a1 - b1 - c
        t = f"ones {a0} - {b0} = {(a0 - b0) % 10} borrow {c} , tens {a1} - {b1} - {c} = {d % 10} borrow {int(d < 0)}"
    return f"{a:02d} {op} {b:02d} : {t} , gives {v:02d}", v


def style(long):
    return f"work {'long' if long else 'short'}\n"


class WorkingSet:
    """Draws from a slowly drifting subset: temporal locality of references."""

    def __init__(self, r, pool, size, drift=0.2):
        self.r, self.pool, self.drift = r, pool, drift
        self.ws = r.sample(pool, min(size, len(pool)))

    def draw(self):
        r = self.r
        if r.random() < self.drift:
            self.ws[r.randrange(len(self.ws))] = r.choice(self.pool)
        return r.choice(self.ws)


def gen_prog(r, n, long):
    rounds = r.choice([1, 1, 2, 3, 5])
    nl = max(4, n // rounds)
    nc, na = r.randint(8, 60), r.randint(2, 6)
    nm = r.sample(NAMES, nc + na)
    C, A = nm[:nc], nm[nc:]
    val = {c: r.randrange(100) for c in C}
    acc = {a: r.randrange(100) for a in A}
    ws = WorkingSet(r, C, 4)
    prog = []
    for _ in range(nl):
        u = r.random()
        a = r.choice(A)
        if u < 0.48:
            prog.append(("add", ws.draw(), a))
        elif u < 0.86:
            prog.append(("sub", ws.draw(), a))
        elif u < 0.93:
            prog.append(("set", ws.draw(), a))
        else:
            b = r.choice([x for x in A if x != a])
            prog.append(("add", b, a))
    goal = r.choice(A)
    st = style(long)
    P = ["run the program with numbers 00 to 99\n", st]
    P += [f"const {c} = {val[c]:02d}\n" for c in C]
    P += [f"start {a} = {acc[a]:02d}\n" for a in A]
    for i, (op, s, a) in enumerate(prog, 1):
        P.append(f"line {i} {_op(op, s, a)}\n")
    P.append(f"run {rounds} times . What is {goal} at the end?")
    T = []
    for k in range(1, rounds + 1):
        if rounds > 1:
            T.append(f"round {k} of {rounds}\n")
        for i, (op, s, a) in enumerate(prog, 1):
            sv = val[s] if s in val else acc[s]
            T.append(f"line {i} {_op(op, s, a)} . {s} is {sv:02d} . ")
            if op == "set":
                acc[a] = sv
                T.append(f"{alt(r, 'so', ['then', 'thus'])} {a} is {sv:02d}\n")
            else:
                av = acc[a]
                t, nv = calc("+" if op == "add" else "-", av, sv, long)
                acc[a] = nv
                T.append(f"{a} was {av:02d} , {t} . {alt(r, 'so', ['then', 'thus'])} {a} is {nv:02d}\n")
    T.append(f"done . {goal} is {acc[goal]:02d}\n")
    return "".join(P), "".join(T), f"{acc[goal]:02d}"


def _op(op, s, a):
    return f"add {s} to {a}" if op == "add" else f"sub {s} from {a}" if op == "sub" else f"set {a} to {s}"


def gen_ledger(r, n, long):
    npeople, ngoods = r.randint(4, 20), r.randint(6, 40)
    nm = r.sample(NAMES, npeople + ngoods)
    P_, G = nm[:npeople], nm[npeople:]
    bal = {p: r.randrange(100) for p in P_}
    cost = {g: r.randint(1, 9) for g in G}
    wp, wg = WorkingSet(r, P_, 4, 0.15), WorkingSet(r, G, 3, 0.25)
    ev = []
    for _ in range(n):
        a = wp.draw()
        b = wp.draw()
        while b == a:
            b = r.choice(P_)
        ev.append((a, r.randint(1, 9), wg.draw(), b))
    goal = r.choice(P_)
    st = style(long)
    P = ["run the ledger with numbers 00 to 99\n", st]
    P += [f"account {p} has {bal[p]:02d}\n" for p in P_]
    P += [f"price one {g} costs {cost[g]}\n" for g in G]
    P += [f"event {i} {a} buys {q} {g} from {b}\n" for i, (a, q, g, b) in enumerate(ev, 1)]
    P.append(f"What has {goal} at the end?")
    T = []
    for i, (a, q, g, b) in enumerate(ev, 1):
        c = cost[g]
        t = q * c
        xa, xb = bal[a], bal[b]
        ta, bal[a] = calc("-", xa, t, long)
        tb, bal[b] = calc("+", xb, t, long)
        T.append(
            f"event {i} {a} buys {q} {g} from {b} . one {g} costs {c} , {alt(r, 'so', ['then', 'thus'])} {q} * {c} = {t:02d} . "
            f"{a} had {xa:02d} , {ta} , now {a} has {bal[a]:02d} . "
            f"{b} had {xb:02d} , {tb} , now {b} has {bal[b]:02d}\n"
        )
    T.append(f"done . {goal} has {bal[goal]:02d}\n")
    return "".join(P), "".join(T), f"{bal[goal]:02d}"


def gen_walk(r, n, long):
    k = r.randint(12, 120)
    nm = r.sample(NAMES, k)
    span = r.choice([3, 8, k])  # small span: the walk lingers in a neighbourhood
    rec = {}
    for i, x in enumerate(nm):

        def pick():
            while True:
                j = (i + r.randint(-span, span)) % k
                if j != i:
                    return nm[j]

        rec[x] = (pick(), pick(), r.randint(1, 9))
    order = nm[:]
    r.shuffle(order)
    cur, tot = r.choice(nm), r.randrange(100)
    st = style(long)
    P = ["walk over the nodes . go left at even total and right at odd total\n", st]
    P += [f"node {x} : left {rec[x][0]} right {rec[x][1]} value {rec[x][2]}\n" for x in order]
    P.append(f"start at {cur} with total {tot:02d} . walk {n} steps . What is the last node and total?")
    T = []
    for i in range(1, n + 1):
        lft, rgt, v = rec[cur]
        ev = tot % 2 == 0
        d, nx = ("left", lft) if ev else ("right", rgt)
        t, nt = calc("+", tot, v, long)
        T.append(
            f"step {i} at {cur} . total {tot:02d} is {'even' if ev else 'odd'} {alt(r, 'so', ['then', 'thus'])} {d} . "
            f"value of {cur} is {v} , {t} . {d} of {cur} is {nx} . go to {nx} with total {nt:02d}\n"
        )
        cur, tot = nx, nt
    T.append(f"done at {cur} with total {tot:02d}\n")
    return "".join(P), "".join(T), f"{cur} {tot:02d}"


def gen_bfs(r, n):
    k = max(8, min(n, len(NAMES) - 4))
    deg = 2 if n < 150 else r.randint(3, 5)
    nm = r.sample(NAMES, k)
    adj = {x: [] for x in nm}
    for i in range(1, k):  # random recursive tree keeps all nodes reachable
        p = nm[r.randint(max(0, i - 24), i - 1)]
        adj[p].append(nm[i])
    for x in nm:
        while len(adj[x]) < deg:
            y = r.choice(nm)
            if y != x and y not in adj[x]:
                adj[x].append(y)
        r.shuffle(adj[x])
    order = nm[:]
    r.shuffle(order)
    start, goal = nm[0], r.choice(nm[max(1, k // 2) :])
    P = ["find the shortest path in the graph\n"]
    P += [f"node {x} to {' '.join(adj[x])}\n" for x in order]
    P.append(f"start {start} goal {goal} . What is the path?")
    T = [f"put 1 {start} level 0\n"]
    q, lev, par, i = [start], {start: 0}, {start: None}, 0
    while i < len(q):
        x = q[i]
        i += 1
        T.append(f"take {i} {x} level {lev[x]} to {' '.join(adj[x])} .")
        for y in adj[x]:
            if y in lev:
                T.append(f" {y} seen .")
            else:
                q.append(y)
                lev[y] = lev[x] + 1
                par[y] = x
                T.append(f" {y} new put {len(q)} {y} level {lev[y]} from {x} .")
        T.append("\n")
    T.append(f"all {len(q)} done . goal {goal} .")
    path, x = [goal], goal
    while par[x] is not None:
        T.append(f" {x} from {par[x]} .")
        x = par[x]
        path.append(x)
    path.reverse()
    T.append(f" {x} is start\npath {' '.join(path)}\n")
    return "".join(P), "".join(T), " ".join(path)


COLS = ["red", "green", "blue"]


def gen_color(r, n):
    k = max(6, min(n, len(NAMES)))
    hard = min(0.25, 16 / k)  # long instances need few hard nodes or the search explodes
    for _ in range(20):
        nm = r.sample(NAMES, k)
        plan = [r.randrange(3) for _ in range(k)]
        near = []
        for i in range(k):
            c = [j for j in range(max(0, i - 40), i) if plan[j] != plan[i]]
            m = min(len(c), 3 + (r.random() < 0.2) if r.random() < hard else r.choice([1, 2, 2]))
            near.append(sorted(r.sample(c, m)))
        col, T, i, steps, was = [None] * k, [], 0, 0, None
        bad = False
        while i < k:
            steps += 1
            if steps > n + n // 2 + 10 or i < 0:
                bad = True
                break
            nb = near[i]
            used = {col[j] for j in nb}
            free = [c for c in range(3) if c not in used]
            T.append(f"node {i + 1} {nm[i]}")
            if was is not None:
                T.append(f" was {COLS[was]}")
            T.append(f" near {' '.join(nm[j] for j in nb) if nb else 'none'} .")
            for j in nb:
                T.append(f" {nm[j]} {COLS[col[j]]} .")
            T.append(f" free {' '.join(COLS[c] for c in free) if free else 'none'} .")
            opts = [c for c in free if was is None or c > was]
            if was is not None:
                T.append(f" next {COLS[opts[0]] if opts else 'none'} .")
            if opts:
                col[i] = opts[0]
                T.append(f" {alt(r, 'so', ['then', 'thus'])} {nm[i]} {COLS[opts[0]]}\n")
                i += 1
                was = None
            else:
                T.append(f" back to {i}\n")
                i -= 1
                if i >= 0:
                    was = col[i]
        if not bad:
            break
    else:
        return None
    g = r.randrange(k)
    P = ["color the graph with red green blue and no near nodes of one color\n"]
    P += [
        f"node {j + 1} {nm[j]} near {' '.join(nm[x] for x in near[j]) if near[j] else 'none'}\n"
        for j in range(k)
    ]
    P.append(f"What is the color of {nm[g]}?")
    T.append(f"all done . {nm[g]} {COLS[col[g]]}\n")
    return "".join(P), "".join(T), COLS[col[g]]


def gen_bucket(r, n):
    k = max(6, min(n, 120))
    xs = [r.randrange(100) for _ in range(k)]
    g = r.randint(1, k)
    P = ["sort the numbers\n"]
    P += [f"item {i} = {x:02d}\n" for i, x in enumerate(xs, 1)]
    P.append(f"which number is sorted number {g}?")
    T, allv = [], []
    for d in range(10):
        T.append(f"scan {d} :")
        got = []
        for i, x in enumerate(xs, 1):
            if x // 10 == d:
                got.append(x)
                T.append(f" {i} = {x:02d} yes ,")
            else:
                T.append(f" {i} = {x:02d} ,")
        s = sorted(got)
        T.append(f" got {' , '.join(f'{x:02d}' for x in got) if got else 'none'} . bucket {d} is")
        if s:
            for x in s:
                allv.append(x)
                T.append(f" {len(allv)} : {x:02d} ,")
        else:
            T.append(" none")
        T.append("\n")
    T.append(f"done . number {g} : {allv[g - 1]:02d}\n")
    return "".join(P), "".join(T), f"{allv[g - 1]:02d}"


def gen_addl(r, n):
    xs = [r.randrange(10000) for _ in range(n)]
    P = ["find the sum of all items\n"]
    P += [f"item {i} = {x:04d}\n" for i, x in enumerate(xs, 1)]
    P.append("What is the sum?")
    T = ["start total 000000\n"]
    tot = 0
    for i, x in enumerate(xs, 1):
        a, b = f"{tot:06d}"[::-1], f"{x:06d}"[::-1]
        T.append(f"item {i} = {x:04d} . total {tot:06d} .")
        c = 0
        for j in range(6):
            s = int(a[j]) + int(b[j]) + c
            T.append(f" d{j + 1} {a[j]} + {b[j]} + {c} = {s:02d} ,")
            c = s // 10
        tot = (tot + x) % 1000000
        T.append(f" {alt(r, 'so', ['then', 'thus'])} total {tot:06d}\n")
    T.append(f"done . total {tot:06d}\n")
    return "".join(P), "".join(T), f"{tot:06d}"


GENS = {
    "prog": gen_prog,
    "ledger": gen_ledger,
    "walk": gen_walk,
    "bfs": gen_bfs,
    "color": gen_color,
    "bucket": gen_bucket,
    "addl": gen_addl,
}
FAMS = list(GENS)
STYLED = ("prog", "ledger", "walk")
