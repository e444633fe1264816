#include <algorithm>

#include "kernels/cuda_dispatch.h"
#include "kernels/embedding/embedding.h"
#include "kernels/embedding/embedding_cuda.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

template <class X, class Y>
void check(const char* op, const View<const int32_t>& ids, const View<X>& table,
           const View<Y>& rows) {
  CHECK(ids.rank() == 1 && table.rank() == 2 && rows.rank() == 2 &&
        rows.size(0) == ids.size(0) && rows.size(1) == table.size(1))
      << "[" << op << "] shapes: ids are " << describe(ids) << ", table is "
      << describe(table) << ", rows are " << describe(rows);
  CHECK(dense_rows(table) && dense_rows(rows))
      << "[" << op << "] last strides: " << describe(table) << ", "
      << describe(rows);
}

void check_ids(const char* op, const View<const int32_t>& ids, int64_t table) {
  for (int64_t t = 0; t < ids.size(0); ++t) {
    CHECK(ids(t) >= 0 && ids(t) < table)
        << "[" << op << "] id " << ids(t) << " of token " << t
        << ", the table has " << table;
  }
}

}  // namespace

template <class T>
void embedding_forward(Launch l, View<const int32_t> ids_T,
                       View<const T> table_VD, View<T> y_TD) {
  if (l.dry) return;
  check("embedding_forward", ids_T, table_VD, y_TD);
  if (kCuda && l.on_cuda()) {
    return cuda::embedding_forward(l, ids_T, table_VD, y_TD);
  }
  check_ids("embedding_forward", ids_T, table_VD.size(0));
  const int64_t d = table_VD.size(1);
  l.threads->parallel_for(
      ids_T.size(0), rows_per_chunk(d), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          std::copy_n(&table_VD(ids_T(t), 0), d, &y_TD(t, 0));
        }
      });
}

size_t embedding_backward_workspace_bytes(const Launch& l, int64_t tokens,
                                          int64_t vocabulary) {
  if (kCuda && l.on_cuda() && tokens > cuda::kMostTokensUngrouped) {
    return cuda::embedding_grouped_bytes(tokens, vocabulary);
  }
  return 0;
}

template <class T>
void embedding_backward(Launch l, View<const int32_t> ids_T,
                        View<const T> dy_TD, View<Accumulator<T>> dtable_VD,
                        int64_t padding_id, std::byte* workspace) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check("embedding_backward", ids_T, dtable_VD, dy_TD);
  if (kCuda && l.on_cuda()) {
    return cuda::embedding_backward(l, ids_T, dy_TD, dtable_VD, padding_id,
                                    workspace);
  }
  check_ids("embedding_backward", ids_T, dtable_VD.size(0));
  // Each column is one thread's, which walks the tokens in order: two tokens of
  // the same id never meet.
  const int64_t d = dtable_VD.size(1);
  l.threads->parallel_for(d, columns_per_chunk(d),
                          [&](int64_t begin, int64_t end) {
                            for (int64_t t = 0; t < ids_T.size(0); ++t) {
                              if (ids_T(t) == padding_id) continue;
                              const T* dy = &dy_TD(t, begin);
                              A* row = &dtable_VD(ids_T(t), begin);
#pragma omp simd
                              for (int64_t j = 0; j < end - begin; ++j)
                                row[j] += load(dy[j]);
                            }
                          });
}

#define TAPELINE_EMBEDDING(T)                                                  \
  template void embedding_forward(Launch, View<const int32_t>, View<const T>,  \
                                  View<T>);                                    \
  template void embedding_backward(Launch, View<const int32_t>, View<const T>, \
                                   View<Accumulator<T>>, int64_t, std::byte*);
TAPELINE_EMBEDDING(float)
TAPELINE_EMBEDDING(bf16)
TAPELINE_EMBEDDING(double)
#undef TAPELINE_EMBEDDING

}  // namespace tapeline
