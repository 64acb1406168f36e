"""Which tasks to run before a given one so that the fewest bytes are in use while it runs: a minimum cut.

A set of tasks that can have run at some moment is closed under "runs before". The blocks in use after it are those that
a task of the set writes and a task outside it still reads. So the set with the fewest bytes is the source side of a
minimum cut (a maximum closure, Picard '76), and no order has fewer bytes in use while the task runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.planners.pass_tasks import PassTasks

# Capacities are 32-bit integers, and so is a capacity plus the flow against it.
_NO_CUT = 2**30
_MOST = 2**29  # what all blocks together count as, at most: bytes are rounded up to units of that


class _FlowNetwork:
    """A flow network under construction."""

    def __init__(self, n_tasks: int) -> None:
        self.source, self.sink = n_tasks, n_tasks + 1
        self.n_nodes = n_tasks + 2
        self._tails: list[int] = []
        self._heads: list[int] = []
        self._capacities: list[int] = []

    def edge(self, tail: int, head: int, nbytes: int = -1) -> None:
        """From `tail` to `head`; without bytes it cannot be cut."""
        self._tails.append(tail)
        self._heads.append(head)
        self._capacities.append(nbytes)

    def block(self, tail: int, heads: Sequence[int], nbytes: int) -> None:
        """Bytes that count once `tail` is in the set, as long as one of `heads` is not."""
        if len(heads) == 1:
            self.edge(tail, heads[0], nbytes)
            return
        node = self.n_nodes
        self.n_nodes += 1
        self.edge(tail, node, nbytes)
        for head in heads:
            self.edge(node, head)

    def source_side(self, largest: bool) -> set[int]:
        """The nodes on the source's side of a minimum cut: of all such cuts the smallest side, or the largest."""
        from scipy.sparse import csr_matrix  # a tenth of what `import shoal` would take
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        nbytes = np.array(self._capacities, dtype=np.int64)
        unit = max(1, -(-int(nbytes[nbytes > 0].sum()) // _MOST))
        capacities = np.where(nbytes < 0, _NO_CUT, -(-nbytes // unit))
        shape = (self.n_nodes, self.n_nodes)
        summed = csr_matrix((capacities, (self._tails, self._heads)), shape=shape)
        data = np.minimum(summed.data, _NO_CUT).astype(np.int32)
        network = csr_matrix((data, summed.indices.astype(np.int32), summed.indptr.astype(np.int32)), shape=shape)
        left = network - maximum_flow(network, self.source, self.sink).flow
        left.data = (left.data > 0).astype(np.int32)
        left.eliminate_zeros()
        if largest:
            beyond = breadth_first_order(left.T.tocsr(), self.sink, return_predecessors=False)
            return set(range(self.n_nodes)).difference(beyond.tolist())
        return set(breadth_first_order(left, self.source, return_predecessors=False).tolist())


def least_prefix(
    tasks: PassTasks, order: Sequence[int], begin: int, end: int, task: int, *, largest: bool = False
) -> set[int]:
    """The tasks of `order[begin:end]` to run before `task`, one of them.

    Args:
        tasks: of the pass.
        order: all of them, in an order in which they can run; what comes before `begin` has run.
        begin, end: of the part whose order is free.
        task: the one for which memory is to be made.
        largest: of several such sets, the one with the most tasks instead of the fewest.
    """
    number = {other: place for place, other in enumerate(order[begin:end])}
    done = set(order[:begin])
    network = _FlowNetwork(len(number))
    seen: set[int] = set()
    for other, node in number.items():
        for earlier in tasks.after[other]:
            if earlier in number:
                network.edge(node, number[earlier])
        for index in (*tasks.reads[other], *tasks.writes[other]):
            if index in seen:
                continue
            seen.add(index)
            block = tasks.blocks[index]
            tail = number.get(block.producer, network.source)
            readers = [number[reader] for reader in block.readers if reader in number]
            if block.stays or any(r not in number and r not in done for r in block.readers):
                if tail != network.source:  # else it counts whatever the order
                    network.edge(tail, network.sink, block.nbytes)
            elif readers:
                network.block(tail, readers, block.nbytes)
    _count_overwriting(network, tasks, number, done, task)
    network.edge(number[task], network.sink)
    for earlier in tasks.after[task]:
        if earlier in number:
            network.edge(network.source, number[earlier])
    before = network.source_side(largest)
    return {other for other, node in number.items() if node in before}


def _count_overwriting(
    network: _FlowNetwork, tasks: PassTasks, number: dict[int, int], done: set[int], task: int
) -> None:
    """The task's first result takes bytes of its own, unless all other readers of what it overwrites have run."""
    target = tasks.overwrites[task]
    if target < 0 or tasks.blocks[target].stays:
        return
    others = [reader for reader in tasks.blocks[target].readers if reader != task and reader not in done]
    if others and all(reader in number for reader in others):
        network.block(network.source, [number[reader] for reader in others], tasks.blocks[target].nbytes)
