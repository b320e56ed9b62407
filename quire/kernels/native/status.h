/* What a kernel returns. Python (__init__.py: `bound`) makes errors of it: sizes that make no sense, of which nothing was
 * computed; memory that could not be allocated, after which outputs are undefined; and ranks that can no longer exchange
 * anything, for a reason that quire_group_error tells. */

#pragma once

enum { DONE = 0, BAD_SIZE = 1, NO_MEMORY = 2, LOST_RANK = 4 };
