/* table.h - large tables of which little is used. */
#ifndef TD_BASE_TABLE_H
#define TD_BASE_TABLE_H

#include <stddef.h>

/* A large table of which little is used: zeroed memory that the kernel backs page by page, when it
 * is first touched. (calloc gives as much only while the heap has nothing to reuse; the calloc of
 * ThreadSanitizer clears, and so backs, all of it.) A guard page follows the last byte, so an
 * access past the end faults. bytes must be a multiple of 64, which is also the alignment. NULL:
 * out of memory. */
void *td_table_alloc(size_t bytes);
void td_table_free(void *table, size_t bytes); /* NULL: nothing */

#endif
