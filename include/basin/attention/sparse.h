// The front door of sparse attention: check, choose, run, and say which implementation ran.
#pragma once

#include "basin/attention/attention.h"
#include "basin/attention/selection.h"

namespace basin::attention {

/// Attention over selected keys. A row's bits depend on the keys it sees and not on how they were named: a selection of every
/// visible key gives the bits of forward(problem) without one. Throws Error(invalid_argument | unsupported) as forward does, naming
/// the first bad row of the selection; nothing has been written then.
Ran forward(const Forward& problem, const Selection& selection, Backend backend, ThreadPool& pool);

/// Fills `indices`. A row's indices depend on its own visible keys only, so chunks and batches do not change them. Throws
/// Error(invalid_argument | unsupported), also for a score that is NaN: nobody can say where it stands.
Ran select(const Indexer& indexer, Backend backend, ThreadPool& pool);

/// What the two refuse; looks at metadata and indices, never at tensor data.
void check(const Forward& problem, const Selection& selection);
void check(const Indexer& indexer);

}  // namespace basin::attention
