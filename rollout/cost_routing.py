"""proto"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import numpy as np

from makespan.rollout.cached import CacheMirror
from makespan.rollout.errors import ReplicaFailure
from makespan.rollout.memory import ReplicaMemory
from makespan.rollout.routing import RouteRequest, Served
from makespan.rollout.simulation.cost import InferenceCost

P = dict(save_s=2.0, factor=1.5, evict=1.0, memwait=1.0, ext_decode=0.0, ext_prefill=0.0, homed=0.0, evhome=0.0, leave=1, gen_turns=1.0, first_homed=1.0)


class CostRouter:
    def __init__(self, replica_ids=(), *, rng, memory=None, cost=InferenceCost()):
        self._rng = rng
        self._memory = memory
        self._cost = cost
        self._names = []
        self._index = {}
        self._mirrors = []
        self._flights = {}  # trajectory: (index, started tokens, uncached, name)
        self._home = {}
        self._homed_ctx = {}
        self._places = {}
        self._gen = 250.0
        self._turn_s = 10.0
        self.P = dict(P)
        self.moves = 0
        self.decisions = 0
        self._n = np.zeros(0); 
        self.add(replica_ids)

    def add(self, replica_ids: Iterable[str]):
        for name in replica_ids:
            self._index[name] = len(self._names)
            self._names.append(name)
            self._mirrors.append(CacheMirror(self._memory))
        k = len(self._names)
        def grow(a): 
            b = np.zeros(k); b[:len(a)] = a; return b
        if not hasattr(self, '_free'):
            self._free = np.zeros(0); self._ctx = np.zeros(0); self._pend = np.zeros(0); self._homed = np.zeros(0)
        self._n = grow(self._n); self._free = grow(self._free); self._ctx = grow(self._ctx); self._pend = grow(self._pend); self._homed = grow(self._homed)

    def route(self, request: RouteRequest) -> str:
        p = self.P; c = self._cost
        t, ctx, now = request.trajectory_id, request.context_tokens, request.now_s
        self.decisions += 1
        k = len(self._names)
        uncached = np.full(k, float(ctx))
        newheld = np.full(k, float(ctx))
        for r in self._places.get(t, ()):
            uncached[r] = max(1, ctx - self._mirrors[r].tokens(t))
            newheld[r] = ctx - self._mirrors[r].held(t)
        wait = np.maximum(self._free - now, 0.0)
        step = c.step_s + c.sequence_s * self._n + c.context_s * self._ctx
        per = c.prefill_s + step / c.chunk_tokens
        wait = np.minimum(wait, self._pend * per)
        gen = self._gen * p['gen_turns']
        own = c.sequence_s + c.context_s * ctx
        cost = wait + uncached * per + gen * (step + own)
        if p['ext_decode']: cost = cost + p['ext_decode'] * self._n * gen * own
        if p['ext_prefill']: cost = cost + p['ext_prefill'] * self._n * uncached * c.prefill_s
        if self._memory is not None:
            M = self._memory.capacity
            run = np.array([m.running for m in self._mirrors], dtype=float)
            wai = np.array([m.waiting for m in self._mirrors], dtype=float)
            over = np.maximum(run + ctx - M, 0.0)
            cost = cost + p['memwait'] * over / np.maximum(run, 1) * self._turn_s
            ev = np.minimum(np.maximum(run + wai + newheld - M, 0.0), wai)
            cost = cost + p['evict'] * ev * c.prefill_s
            if p['evhome']:
                h = self._homed.copy()
                hh = self._home.get(t)
                if hh is not None: h[hh] -= self._homed_ctx[t]
                cost = cost + p['evhome'] * np.maximum(h + ctx - M, 0.0) * c.prefill_s
        home = self._home.get(t)
        if home is None and p['first_homed']:
            cost = cost + p['first_homed'] * self._homed / M * 10 if self._memory is not None else cost
        if home is None:
            best = cost.min()
            r = self._rng.choice(np.flatnonzero(cost <= best + 1e-9).tolist())
        else:
            r = int(cost.argmin())
            if r != home and not (cost[home] - cost[r] > p['save_s'] and cost[home] > p['factor'] * cost[r]):
                r = home
            if r != home: self.moves += 1
        if home is not None:
            self._homed[home] -= self._homed_ctx[t]
        self._homed[r] += ctx; self._homed_ctx[t] = ctx
        self._home[t] = r
        u = float(uncached[r])
        self._n[r] += 1
        self._ctx[r] += ctx
        self._pend[r] += u
        self._free[r] = max(now, self._free[r]) + u * float(per[r])
        self._drop(r, self._mirrors[r].start(t, ctx))
        self._places.get(t, set()).discard(r)
        self._flights[t] = (r, ctx, u)
        return self._names[r]

    def _drop(self, r, gone):
        for t in gone:
            s = self._places.get(t)
            if s is not None:
                s.discard(r)
                if not s: del self._places[t]

    def release(self, replica_id, trajectory_id="", served: Served | None = None):
        fl = self._flights.pop(trajectory_id, None)
        if fl is None: return
        r, ctx, u = fl
        self._n[r] -= 1; self._ctx[r] -= ctx; self._pend[r] -= u
        end = ctx
        if served is not None:
            end = served.context_tokens
            self._gen += 0.02 * (end - ctx - self._gen)
            self._turn_s += 0.02 * (served.seconds - self._turn_s)
        self._drop(r, self._mirrors[r].end(trajectory_id, ctx, end))
        self._places.setdefault(trajectory_id, set()).add(r)

    def finish(self, t):
        h = self._home.pop(t, None)
        if h is not None: self._homed[h] -= self._homed_ctx.pop(t)
        for r in self._places.get(t, ()):
            self._mirrors[r].finish(t)

    def pause(self, t):
        if not self.P['leave']: return
        h = self._home.pop(t, None)
        if h is not None: self._homed[h] -= self._homed_ctx.pop(t)

    def forget(self): return 0
    def remove(self, ids): pass
    def in_flight(self): return dict(zip(self._names, self._n.astype(int).tolist()))
