/* quantize_stream.c - tensors converted in a stream: batches of rows, of which each thread reads
 * its own as f32 and rounds them to the result's format; one thread appends the batch to the
 * file. */
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/progress.h"
#include "common/model/quantize_internal.h"
#include "kernels/quantize.h"

#define BATCH_BYTES ((int64_t)2 << 20) /* of f32, for each thread */

struct sink {
    td_status (*append)(void *ctx, const void *bytes, size_t n_bytes, struct td_err *err);
    void *ctx;
    struct td_progress progress;
    uint64_t done;
};

struct stream {
    const struct td_piece *piece;
    int64_t first_row, n_rows; /* of this batch */
    uint8_t *out;              /* [n_rows] rows of the result */
    float *values;             /* [threads][n_cols] */
    _Atomic int64_t bad_row;   /* -1: none */
};

/* Row r of the model at row `row` of a result with paired rows. */
static int64_t row_of_pair(int64_t row, int32_t head)
{
    if (!head) return row;
    int64_t i = row % head;
    return row - i + i / 2 + i % 2 * (head / 2);
}

/* Row r of the model as it stands in a tensor. */
static const uint8_t *row_at(const struct td_piece *p, int64_t row)
{
    const struct td_tensor *t = p->from;
    int64_t r = row_of_pair(row, p->paired_head_rows), head = t->paired_head_rows;
    if (head) {
        int64_t i = r % head, half = head / 2;
        r = r - i + (i < half ? 2 * i : 2 * (i - half) + 1);
    }
    return t->data + td_format_bytes(t->format, r * p->n_cols);
}

bool td_piece_read_row(const struct td_piece *p, int64_t row, float *ret_values)
{
    if (p->from)
        td_format_read(p->from->format, row_at(p, row), p->n_cols, ret_values);
    else
        memcpy(ret_values, p->values + row * p->n_cols, (size_t)p->n_cols * sizeof *ret_values);
    bool finite = true;
    for (int64_t i = 0; i < p->n_cols; i++) {
        if (p->times) ret_values[i] *= p->times[i];
        if (p->over) ret_values[i] /= p->over[i];
        finite &= (bool)isfinite(ret_values[i]);
    }
    return finite;
}

static bool convert_row(const struct td_piece *p, int64_t row, float *values, uint8_t *out)
{
    bool is_copy = p->from && !p->times && !p->over && p->from->format == p->format;
    if (is_copy && !p->codes && !p->format->dtype) {
        memcpy(out, row_at(p, row), td_format_bytes(p->format, p->n_cols));
        return true;
    }
    if (p->codes == TD_CODES_SHAPE) {
        memcpy(out, p->shape, sizeof p->shape);
        return true;
    }
    if (!td_piece_read_row(p, row, values)) return false;
    if (p->codes == TD_CODES_INT4)
        return td_int4_write(values, (int32_t)p->n_cols, p->group, p->format,
                             p->row_scales + row * (p->n_cols / p->group), out);
    if (!p->codes) return td_format_write(p->format, values, p->n_cols, out);
    float scale = p->tensor_scale;
    if (scale == 0)
        scale = p->row_scales[row] =
            td_codes_scale(p->codes == TD_CODES_FP8, td_values_max(values, p->n_cols), p->format);
    td_codes_write(p->codes == TD_CODES_FP8, values, p->n_cols, scale, out);
    return true;
}

static void convert_part(void *ctx, int part, int n_parts)
{
    struct stream *s = ctx;
    const struct td_piece *p = s->piece;
    int64_t lo = s->n_rows * part / n_parts, hi = s->n_rows * (part + 1) / n_parts;
    size_t row_bytes = td_piece_row_bytes(p);
    for (int64_t i = lo; i < hi; i++)
        if (!convert_row(p, s->first_row + i, s->values + part * p->n_cols,
                         s->out + (size_t)i * row_bytes)) {
            int64_t none = -1;
            atomic_compare_exchange_strong(&s->bad_row, &none, s->first_row + i);
            return;
        }
}

static td_status stream_piece(const struct td_quantize *q, const struct td_piece *p,
                              struct sink *sink, struct td_err *err)
{
    int n_threads = td_thread_pool_size(q->threads);
    int64_t batch = BATCH_BYTES / (p->n_cols * 4) * n_threads;
    if (batch < n_threads) batch = n_threads;
    if (batch > p->n_rows) batch = p->n_rows;
    size_t row_bytes = td_piece_row_bytes(p);
    struct stream st = {.piece = p, .bad_row = -1};
    st.out = malloc((size_t)batch * row_bytes);
    st.values = malloc((size_t)n_threads * (size_t)p->n_cols * sizeof(float));
    td_status s = st.out && st.values
                      ? TD_OK
                      : td_fail(err, TD_ERR_NOMEM, "tensor %s: no memory for %zu bytes", p->name,
                                (size_t)batch * row_bytes);
    for (; st.first_row < p->n_rows && !s; st.first_row += batch) {
        st.n_rows = p->n_rows - st.first_row < batch ? p->n_rows - st.first_row : batch;
        td_thread_pool_run(q->threads, convert_part, &st);
        if (st.bad_row >= 0)
            s = td_fail(err, TD_ERR_CORRUPT,
                        "%s: tensor %s, row %" PRId64 ": a value is infinite, no number, or too "
                        "large for %s",
                        q->from, p->name, (int64_t)st.bad_row, p->format->name);
        else
            s = sink->append(sink->ctx, st.out, (size_t)st.n_rows * row_bytes, err);
        sink->done += (uint64_t)st.n_rows * row_bytes;
        if (!q->quiet) td_progress_update(&sink->progress, sink->done);
    }
    free(st.out);
    free(st.values);
    return s;
}

td_status td_quantize_stream(const struct td_quantize *q, const struct td_piece *pieces, int32_t n,
                             td_status (*append)(void *ctx, const void *bytes, size_t n_bytes,
                                                 struct td_err *err),
                             void *ctx, struct td_err *err)
{
    struct sink sink = {.append = append, .ctx = ctx};
    td_status s = TD_OK;
    if (!q->quiet) td_progress_start(&sink.progress, "writing", "B", q->ret_to_bytes);
    for (int32_t i = 0; i < n && !s; i++) s = stream_piece(q, &pieces[i], &sink, err);
    if (!s && !q->quiet) td_progress_end(&sink.progress);
    return s;
}
