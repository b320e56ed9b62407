/* What a kernel returns. Python (__init__.py: `bound`) makes errors of it: sizes that make no sense, of which nothing was
 * computed, and memory that could not be allocated, after which outputs are undefined. */

#pragma once

enum { DONE = 0, BAD_SIZE = 1, NO_MEMORY = 2 };
