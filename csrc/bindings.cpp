// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
//
// te_grouped_mlp._C: addresses in, each with the bytes that may be used from there; nothing
// allocated for the caller, nothing kept. Every argument is checked here, before any memory is
// touched, and the GIL is released for the work. One function looks at tensors themselves instead,
// and keeps the GIL.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "common.hpp"
#include "stacking.hpp"

namespace py = pybind11;
using namespace te_grouped_mlp;

namespace {

// Memory of the caller's: (address, bytes), or None for what is not wanted. A tensor that has lost
// its memory is (0, 0), which is not the same: it is refused wherever its bytes are needed.
struct Span {
  bool wanted = false;
  std::uintptr_t address = 0;
  std::int64_t bytes = 0;
};

template <typename T>
T* pointer(const Span& span) {
  return reinterpret_cast<T*>(span.address);
}

}  // namespace

namespace pybind11::detail {

template <>
struct type_caster<Span> {
  PYBIND11_TYPE_CASTER(Span, const_name("tuple[int, int] | None"));

  bool load(handle source, bool) {
    value = Span{};
    if (source.is_none()) return true;
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 2) return false;
    value.wanted = true;
    value.address = PyLong_AsSize_t(PyTuple_GET_ITEM(source.ptr(), 0));
    if (PyErr_Occurred() == nullptr) {
      value.bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(source.ptr(), 1));
    }
    const bool loaded = PyErr_Occurred() == nullptr;
    PyErr_Clear();
    return loaded;
  }
};

}  // namespace pybind11::detail

namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& value,
                         const std::string& allowed) {
  throw std::invalid_argument(name + " is " + value + ", allowed: " + allowed);
}

int check_choice(const char* name, int value, int count, const char* allowed) {
  if (value < 0 || value >= count) refuse(name, std::to_string(value), allowed);
  return value;
}

SourceType check_type(const char* name, int value) {
  return static_cast<SourceType>(
      check_choice(name, value, kNumSourceTypes, "F32=0, F16=1, BF16=2, F64=3"));
}

Fp8Format check_format(int value) {
  return static_cast<Fp8Format>(check_choice("fp8", value, kNumFp8Formats, "E4M3=0, E5M2=1"));
}

Axis check_axis(int value) {
  return static_cast<Axis>(check_choice("axis", value, 2, "ROW=0, COLUMN=1"));
}

// Returns a request for decide_threads: 0 becomes at most torch's number, where torch is loaded. It
// is OMP_NUM_THREADS until torch.set_num_threads changes it.
int check_threads(int threads) {
  constexpr int kMaxThreads = 1024;
  if (threads < 0 || threads > kMaxThreads) {
    refuse("threads", std::to_string(threads), "0 (decide) to " + std::to_string(kMaxThreads));
  }
  if (threads > 0) return threads;
  PyObject* torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
  const py::object ask =
      torch == nullptr ? py::none() : py::getattr(torch, "get_num_threads", py::none());
  return ask.is_none() ? 0 : -std::max(1, ask().cast<int>());
}

void check_shape(std::int64_t rows, std::int64_t cols) {
  if (rows < 0) refuse("rows", std::to_string(rows), "0 or more");
  if (cols < 0) refuse("cols", std::to_string(cols), "0 or more");
  // Room for padding to tiles and for 8-byte elements, so that no offset overflows.
  const std::int64_t most = std::numeric_limits<std::int64_t>::max() / 16;
  if (cols > most / kTile || rows > most / round_up(cols + 1, kTile) - kTile) {
    refuse("rows x cols", std::to_string(rows) + " x " + std::to_string(cols),
           "at most 2^59 elements");
  }
}

void check_blocks(const char* name, std::int64_t value) {
  if (value % kBlock != 0) refuse(name, std::to_string(value), "multiples of 32");
}

// Bytes that some elements take. A number that no memory holds is too many for every span.
std::int64_t bytes_of(std::int64_t rows, std::int64_t cols, std::int64_t size) {
  std::int64_t count = 0, bytes = 0;
  if (__builtin_mul_overflow(rows, cols, &count) || __builtin_mul_overflow(count, size, &bytes)) {
    return std::numeric_limits<std::int64_t>::max();
  }
  return bytes;
}

// `alignment` is that of the type through which the memory is read.
void check_span(const char* name, const Span& span, std::int64_t needed, std::int64_t alignment) {
  if (needed == 0) return;
  if (!span.wanted) refuse(name, "None", std::to_string(needed) + " bytes");
  if (span.address == 0 || span.bytes < needed) {
    refuse(name, std::to_string(span.address == 0 ? 0 : span.bytes) + " bytes long",
           "at least " + std::to_string(needed) + " bytes, by the shape");
  }
  if (span.address % static_cast<std::uintptr_t>(alignment) != 0) {
    refuse(name, "at an address that is no multiple of " + std::to_string(alignment),
           "aligned to its elements");
  }
}

void check_floats(const char* name, const Span& span, std::int64_t rows, std::int64_t cols) {
  check_span(name, span, bytes_of(rows, cols, sizeof(float)), alignof(float));
}

// The scales of a matrix: one for each block, padded to whole tiles.
std::int64_t scale_bytes(Axis axis, std::int64_t rows, std::int64_t cols) {
  return axis == Axis::kRow ? round_up(rows, kTile) * round_up(cols / kBlock, kBlocksPerTile)
                            : round_up(rows / kBlock, kBlocksPerTile) * round_up(cols, kTile);
}

void check_scales(const char* name, const Span& span, Axis axis, std::int64_t rows,
                  std::int64_t cols) {
  check_span(name, span, scale_bytes(axis, rows, cols), 1);
}

// A pair that is wanted or not wanted as a whole.
bool check_pair(const char* data_name, const Span& data, const char* scale_name,
                const Span& scale) {
  if (data.wanted != scale.wanted) {
    refuse(data.wanted ? scale_name : data_name, "None",
           std::string("memory, because ") + (data.wanted ? data_name : scale_name) + " is given");
  }
  return data.wanted;
}

Source check_source(const Span& src, int src_dtype, std::int64_t rows, std::int64_t cols,
                    std::int64_t row_stride) {
  const SourceType type = check_type("src_dtype", src_dtype);
  check_shape(rows, cols);
  if (row_stride < cols && rows > 1) {
    refuse("row_stride", std::to_string(row_stride), "at least cols = " + std::to_string(cols));
  }
  if (rows > 1 && row_stride > std::numeric_limits<std::int64_t>::max() / 16 / rows) {
    refuse("row_stride", std::to_string(row_stride), "rows x row_stride at most 2^59 elements");
  }
  return Source{pointer<const void>(src), type, rows, cols, row_stride};
}

// The whole matrix must be there, also where the groups end before it.
void check_matrix(const Source& source, const Span& span) {
  const std::int64_t size = size_of(source.type);
  const std::int64_t elements =
      source.rows == 0 || source.cols == 0
          ? 0
          : (source.rows - 1) * (source.rows > 1 ? source.row_stride : 0) + source.cols;
  check_span("src", span, bytes_of(1, elements, size), size);
}

// Reads the row counts of all groups (dense: one group of all rows) and returns where they lie.
Groups check_splits(const Span& splits, std::int64_t num_groups, std::int64_t rows,
                    std::int64_t multiple) {
  if (num_groups < 0) refuse("num_groups", std::to_string(num_groups), "0 (dense) or more");
  if (!splits.wanted) {
    if (num_groups != 0) {
      refuse("splits", "None", std::to_string(num_groups) + " int64 row counts, by num_groups");
    }
    return Groups{Group{0, rows}};
  }
  if (num_groups == 0) refuse("num_groups", "0", "1 or more, because splits is given");
  check_span("splits", splits, bytes_of(1, num_groups, sizeof(std::int64_t)),
             alignof(std::int64_t));
  const std::int64_t* counts = pointer<const std::int64_t>(splits);
  Groups groups;
  std::int64_t sum = 0;
  for (std::int64_t g = 0; g < num_groups; ++g) {
    const std::string name = "splits[" + std::to_string(g) + "]";
    if (counts[g] < 0) refuse(name, std::to_string(counts[g]), "0 or more");
    if (counts[g] % multiple != 0) {
      refuse(name, std::to_string(counts[g]), "multiples of " + std::to_string(multiple));
    }
    if (counts[g] > rows - sum) {
      refuse(name, std::to_string(counts[g]),
             "a sum of splits of at most rows = " + std::to_string(rows) + ", with " +
                 std::to_string(sum) + " rows before it");
    }
    groups.push_back(Group{sum, counts[g]});
    sum += counts[g];
  }
  return groups;
}

bool has_work(const Groups& groups, std::int64_t cols) {
  return cols > 0 && groups.back().first_row + groups.back().rows > 0;
}

void mxfp8_quantize(const Span& src, int src_dtype, std::int64_t rows, std::int64_t cols,
                    std::int64_t row_stride, const Span& row_data, const Span& row_scale,
                    const Span& col_data, const Span& col_scale, int fp8, bool swizzled,
                    const Span& splits, std::int64_t num_groups, bool two_d, bool nan_in_scale,
                    int threads) {
  const Source source = check_source(src, src_dtype, rows, cols, row_stride);
  const Fp8Format format = check_format(fp8);
  threads = check_threads(threads);
  const Groups groups = check_splits(splits, num_groups, rows, kTile);
  if (!has_work(groups, cols)) return;
  check_matrix(source, src);
  const bool by_row = check_pair("row_data", row_data, "row_scale", row_scale);
  const bool by_col = check_pair("col_data", col_data, "col_scale", col_scale);
  if (!by_row && !by_col) {
    refuse("row_data and col_data", "None", "at least one of them wanted");
  }
  if (by_row || two_d) check_blocks("cols", cols);
  if (by_col || two_d) check_blocks("rows", rows);
  if (by_row) {
    check_span("row_data", row_data, bytes_of(rows, cols, 1), 1);
    check_scales("row_scale", row_scale, Axis::kRow, rows, cols);
  }
  if (by_col) {
    check_span("col_data", col_data, bytes_of(rows, cols, 1), 1);
    check_scales("col_scale", col_scale, Axis::kColumn, rows, cols);
  }
  const QuantizeOutputs outputs{pointer<std::uint8_t>(row_data), pointer<std::uint8_t>(row_scale),
                                pointer<std::uint8_t>(col_data), pointer<std::uint8_t>(col_scale)};
  const QuantizeOptions options{format, swizzled, two_d, nan_in_scale};
  const py::gil_scoped_release release;
  quantize(source, groups, outputs, options, threads);
}

void mxfp8_dequantize(const Span& data, const Span& scale, int fp8, int axis, bool swizzled,
                      std::int64_t rows, std::int64_t cols, const Span& out, int out_dtype,
                      const Span& splits, std::int64_t num_groups, int threads) {
  const Fp8Format format = check_format(fp8);
  const Axis along = check_axis(axis);
  const SourceType type = check_type("out_dtype", out_dtype);
  check_shape(rows, cols);
  threads = check_threads(threads);
  const Groups groups = check_splits(splits, num_groups, rows, kTile);
  if (along == Axis::kRow) check_blocks("cols", cols);
  if (along == Axis::kColumn) check_blocks("rows", rows);
  if (!has_work(groups, cols)) return;
  check_span("data", data, bytes_of(rows, cols, 1), 1);
  check_scales("scale", scale, along, rows, cols);
  check_span("out", out, bytes_of(rows, cols, size_of(type)), size_of(type));
  const DequantizeInput input{pointer<const std::uint8_t>(data), pointer<std::uint8_t>(scale),
                              format, along, swizzled};
  const py::gil_scoped_release release;
  dequantize(input, groups, cols, pointer<void>(out), type, threads);
}

void bind_swizzle_scales(const Span& src, const Span& dst, int axis, std::int64_t rows,
                         std::int64_t cols, const Span& splits, std::int64_t num_groups,
                         bool inverse) {
  const Axis along = check_axis(axis);
  check_shape(rows, cols);
  const Groups groups = check_splits(splits, num_groups, rows, kTile);
  if (along == Axis::kRow) check_blocks("cols", cols);
  if (along == Axis::kColumn) check_blocks("rows", rows);
  if (!has_work(groups, cols)) return;
  check_scales("src", src, along, rows, cols);
  check_scales("dst", dst, along, rows, cols);
  const auto size = static_cast<std::uintptr_t>(scale_bytes(along, rows, cols));
  if (src.address < dst.address + size && dst.address < src.address + size) {
    refuse("dst", "in the memory of src", "a buffer of its own: tiles move past each other");
  }
  const py::gil_scoped_release release;
  swizzle_scales(pointer<std::uint8_t>(src), pointer<std::uint8_t>(dst), along, groups, cols,
                 inverse);
}

void sum_columns(const Span& src, int src_dtype, std::int64_t rows, std::int64_t cols,
                 std::int64_t row_stride, const Span& weights, bool weighted, const Span& splits,
                 std::int64_t num_groups, const Span& out, int threads) {
  const Source source = check_source(src, src_dtype, rows, cols, row_stride);
  threads = check_threads(threads);
  const Groups groups = check_splits(splits, num_groups, rows, 1);
  if (cols == 0) return;
  if (has_work(groups, cols)) {
    check_matrix(source, src);
    if (weighted) check_floats("weights_f32", weights, rows, 1);
  }
  check_floats("out_f32", out, static_cast<std::int64_t>(groups.size()), cols);
  const py::gil_scoped_release release;
  column_sums(source, groups, weighted ? pointer<const float>(weights) : nullptr,
              pointer<float>(out), threads);
}

void bind_column_sums(const Span& src, int src_dtype, std::int64_t rows, std::int64_t cols,
                      std::int64_t row_stride, const Span& splits, std::int64_t num_groups,
                      const Span& out, int threads) {
  sum_columns(src, src_dtype, rows, cols, row_stride, {}, false, splits, num_groups, out, threads);
}

void bind_weighted_column_sums(const Span& src, int src_dtype, std::int64_t rows,
                               std::int64_t cols, std::int64_t row_stride, const Span& weights,
                               const Span& splits, std::int64_t num_groups, const Span& out,
                               int threads) {
  sum_columns(src, src_dtype, rows, cols, row_stride, weights, true, splits, num_groups, out,
              threads);
}

void bind_row_dots(const Span& src, int src_dtype, std::int64_t rows, std::int64_t cols,
                   std::int64_t row_stride, const Span& table, const Span& splits,
                   std::int64_t num_groups, const Span& out, int threads) {
  const Source source = check_source(src, src_dtype, rows, cols, row_stride);
  threads = check_threads(threads);
  const Groups groups = check_splits(splits, num_groups, rows, 1);
  if (!has_work(groups, 1)) return;
  if (cols > 0) {
    check_matrix(source, src);
    check_floats("table_f32", table, static_cast<std::int64_t>(groups.size()), cols);
  }
  check_floats("out_f32", out, rows, 1);
  const py::gil_scoped_release release;
  row_dots(source, groups, pointer<const float>(table), pointer<float>(out), threads);
}

constexpr const char* kModuleDoc =
    "CPU kernels of te-grouped-mlp.\n\n"
    "Memory is (address, bytes), as op.capacity.span makes it of a tensor; None means not wanted.\n"
    "Nothing is allocated for the caller and nothing is kept. Source dtypes: F32=0, F16=1, BF16=2,\n"
    "F64=3. FP8 formats: E4M3=0, E5M2=1. Axes: ROW=0 (1x32 blocks), COLUMN=1 (32x1 blocks).\n"
    "splits: int64[num_groups] row counts on the host, or None with num_groups=0 for one dense\n"
    "group; with splits only the rows before their sum are read or written. threads=0 decides: at\n"
    "most torch's number and the CPUs of the process. A bad argument, and memory that is shorter\n"
    "than the shape needs, raise ValueError before any work. Results do not depend on the SIMD\n"
    "level or the thread count.";

constexpr const char* kQuantizeDoc =
    "Quantizes (rows, cols) to MXFP8, along rows, columns or both in one pass.\n\n"
    "row_data, col_data: (rows, cols) bytes, row-major. row_scale, col_scale: E8M0 bytes, compact\n"
    "or swizzled; every 128x128 scale tile is written whole, padding as 0. two_d: one scale per\n"
    "32x32 block. nan_in_scale: a NaN makes its block's scale 0xFF and the block NaN; otherwise "
    "it\n"
    "does not take part in the maximum. float64 is rounded to float32 first.";

constexpr const char* kDequantizeDoc =
    "out = data * 2^(scale - 127), (rows, cols) row-major. float64 is exact; the other types are\n"
    "the float32 product, rounded to nearest even.";

constexpr const char* kSwizzleDoc =
    "Moves E8M0 scales from the compact layout to the swizzled one, or back with inverse. rows "
    "and\n"
    "cols are those of the data. Padding is written as 0. src and dst must not overlap.";

constexpr const char* kColumnSumsDoc =
    "out[g, j] = sum of src[i, j] over the rows of group g, float32 (groups, cols). Each tile of\n"
    "128 rows of a group is summed from the top in float32 (float64 for float64), then the tiles\n"
    "in order. An empty group gives 0.";

constexpr const char* kWeightedColumnSumsDoc =
    "column_sums of src[i, j] * weights[i]; the product is rounded before it is added.";

constexpr const char* kRowDotsDoc =
    "out[i] = sum over j of src[i, j] * table[group of i, j], float32, for rows before the sum of\n"
    "splits. Products go to lane j % 32 in order; the lanes are then halved pairwise.";

constexpr const char* kUniformStrideDoc =
    "Bytes from each tensor to the next, 0 where they differ or for one tensor; None unless all\n"
    "have one shape, strides, element type and device, and a storage that was not freed, or where\n"
    "that cannot be seen. table is torch.Tensor.__dlpack_c_exchange_api__; tensors a list or tuple\n"
    "of exactly the two types.";

bool is_freed(py::handle tensor) {
  return tensor.attr("untyped_storage")().attr("nbytes")().cast<std::int64_t>() == 0;
}

py::object bind_uniform_stride(py::handle table, py::handle tensors, py::handle tensor_type,
                               py::handle parameter_type) {
  const auto* api =
      static_cast<const ExchangeTable*>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api"));
  const bool is_list = PyList_Check(tensors.ptr());
  if (api == nullptr || !(is_list || PyTuple_Check(tensors.ptr()))) {
    PyErr_Clear();
    return py::none();
  }
  const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(tensors.ptr()));
  PyObject** items = PySequence_Fast_ITEMS(tensors.ptr());
  for (std::size_t i = 0; i < count; ++i) {
    // The framework's function takes the type on trust.
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(items[i]));
    if (type != tensor_type.ptr() && type != parameter_type.ptr()) return py::none();
  }
  const Stacking layout = stacking(*api, reinterpret_cast<void* const*>(items), count);
  PyErr_Clear();
  if (!layout.uniform || (layout.low && std::any_of(items, items + count, is_freed))) {
    return py::none();
  }
  return py::int_(layout.stride);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = kModuleDoc;
  module.def("mxfp8_quantize", &mxfp8_quantize, kQuantizeDoc, py::arg("src"), py::arg("src_dtype"),
             py::arg("rows"), py::arg("cols"), py::arg("row_stride"), py::arg("row_data"),
             py::arg("row_scale"), py::arg("col_data"), py::arg("col_scale"), py::arg("fp8"),
             py::arg("swizzled"), py::arg("splits"), py::arg("num_groups"), py::arg("two_d"),
             py::arg("nan_in_scale"), py::arg("threads"));
  module.def("mxfp8_dequantize", &mxfp8_dequantize, kDequantizeDoc, py::arg("data"),
             py::arg("scale"), py::arg("fp8"), py::arg("axis"), py::arg("swizzled"),
             py::arg("rows"), py::arg("cols"), py::arg("out"), py::arg("out_dtype"),
             py::arg("splits"), py::arg("num_groups"), py::arg("threads"));
  module.def("swizzle_scales", &bind_swizzle_scales, kSwizzleDoc, py::arg("src"), py::arg("dst"),
             py::arg("axis"), py::arg("rows"), py::arg("cols"), py::arg("splits"),
             py::arg("num_groups"), py::arg("inverse"));
  module.def("column_sums", &bind_column_sums, kColumnSumsDoc, py::arg("src"), py::arg("src_dtype"),
             py::arg("rows"), py::arg("cols"), py::arg("row_stride"), py::arg("splits"),
             py::arg("num_groups"), py::arg("out_f32"), py::arg("threads"));
  module.def("weighted_column_sums", &bind_weighted_column_sums, kWeightedColumnSumsDoc,
             py::arg("src"), py::arg("src_dtype"), py::arg("rows"), py::arg("cols"),
             py::arg("row_stride"), py::arg("weights_f32"), py::arg("splits"),
             py::arg("num_groups"), py::arg("out_f32"), py::arg("threads"));
  module.def("row_dots", &bind_row_dots, kRowDotsDoc, py::arg("src"), py::arg("src_dtype"),
             py::arg("rows"), py::arg("cols"), py::arg("row_stride"), py::arg("table_f32"),
             py::arg("splits"), py::arg("num_groups"), py::arg("out_f32"), py::arg("threads"));
  module.def("uniform_stride", &bind_uniform_stride, kUniformStrideDoc, py::arg("table"),
             py::arg("tensors"), py::arg("tensor_type"), py::arg("parameter_type"));
  module.def(
      "threads_for", [](std::int64_t bytes) { return decide_threads(check_threads(0), bytes); },
      py::arg("bytes"), "The number of threads that threads=0 means here for that much work.");
  module.def(
      "simd_level", [] { return std::string(kernels().name); },
      "The SIMD level in use: baseline, avx2 or avx512.");
  module.def("set_simd_level", &set_simd_level, py::arg("name"),
             "Chooses a SIMD level, for tests. Raises ValueError if this CPU lacks it.");
  module.def("available_simd_levels", &available_simd_levels,
             "The SIMD levels that this CPU runs, weakest first.");
}
