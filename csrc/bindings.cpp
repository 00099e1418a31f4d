// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
//
// te_grouped_mlp._C: raw addresses in, nothing allocated for the caller, nothing kept. Every
// argument is checked here, before any memory is touched, and the GIL is released for the work.
// One function looks at tensors themselves instead, and keeps the GIL.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "common.hpp"
#include "spacing.hpp"

namespace py = pybind11;
using namespace te_grouped_mlp;

namespace {

using Address = std::uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

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

void check_not_null(const char* name, Address address) {
  if (address == 0) refuse(name, "0 (null)", "the address of the data");
}

// A pair that is wanted or not wanted as a whole.
bool check_pair(const char* data_name, Address data, const char* scale_name, Address scale) {
  if ((data == 0) != (scale == 0)) {
    const bool data_missing = data == 0;
    refuse(data_missing ? data_name : scale_name, "0 (not wanted)",
           std::string("an address, because ") + (data_missing ? scale_name : data_name) +
               " is given");
  }
  return data != 0;
}

Source check_source(Address src, int src_dtype, std::int64_t rows, std::int64_t cols,
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

// Reads the row counts of all groups (dense: one group of all rows) and returns where they lie.
Groups check_splits(Address splits, std::int64_t num_groups, std::int64_t rows,
                    std::int64_t multiple) {
  if (num_groups < 0) refuse("num_groups", std::to_string(num_groups), "0 (dense) or more");
  if (splits == 0) {
    if (num_groups != 0) {
      refuse("splits", "0 (null)",
             "the address of num_groups = " + std::to_string(num_groups) + " int64 row counts");
    }
    return Groups{Group{0, rows}};
  }
  if (num_groups == 0) refuse("num_groups", "0", "1 or more, because splits is given");
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

void mxfp8_quantize(Address src, int src_dtype, std::int64_t rows, std::int64_t cols,
                    std::int64_t row_stride, Address row_data, Address row_scale, Address col_data,
                    Address col_scale, int fp8, bool swizzled, Address splits,
                    std::int64_t num_groups, bool two_d, bool nan_in_scale, int threads) {
  const Source source = check_source(src, src_dtype, rows, cols, row_stride);
  const Fp8Format format = check_format(fp8);
  threads = check_threads(threads);
  const Groups groups = check_splits(splits, num_groups, rows, kTile);
  if (!has_work(groups, cols)) return;
  check_not_null("src", src);
  const bool by_row = check_pair("row_data", row_data, "row_scale", row_scale);
  const bool by_col = check_pair("col_data", col_data, "col_scale", col_scale);
  if (!by_row && !by_col) {
    refuse("row_data and col_data", "0 (not wanted)", "at least one of them wanted");
  }
  if (by_row || two_d) check_blocks("cols", cols);
  if (by_col || two_d) check_blocks("rows", rows);
  const QuantizeOutputs outputs{pointer<std::uint8_t>(row_data), pointer<std::uint8_t>(row_scale),
                                pointer<std::uint8_t>(col_data), pointer<std::uint8_t>(col_scale)};
  const QuantizeOptions options{format, swizzled, two_d, nan_in_scale};
  const py::gil_scoped_release release;
  quantize(source, groups, outputs, options, threads);
}

void mxfp8_dequantize(Address data, Address scale, int fp8, int axis, bool swizzled,
                      std::int64_t rows, std::int64_t cols, Address out, int out_dtype,
                      Address splits, std::int64_t num_groups, int threads) {
  const Fp8Format format = check_format(fp8);
  const Axis along = check_axis(axis);
  const SourceType type = check_type("out_dtype", out_dtype);
  check_shape(rows, cols);
  threads = check_threads(threads);
  const Groups groups = check_splits(splits, num_groups, rows, kTile);
  if (along == Axis::kRow) check_blocks("cols", cols);
  if (along == Axis::kColumn) check_blocks("rows", rows);
  if (!has_work(groups, cols)) return;
  check_not_null("data", data);
  check_not_null("scale", scale);
  check_not_null("out", out);
  const DequantizeInput input{pointer<const std::uint8_t>(data), pointer<std::uint8_t>(scale),
                              format, along, swizzled};
  const py::gil_scoped_release release;
  dequantize(input, groups, cols, pointer<void>(out), type, threads);
}

void bind_swizzle_scales(Address src, Address dst, int axis, std::int64_t rows, std::int64_t cols,
                         Address splits, std::int64_t num_groups, bool inverse) {
  const Axis along = check_axis(axis);
  check_shape(rows, cols);
  const Groups groups = check_splits(splits, num_groups, rows, kTile);
  if (along == Axis::kRow) check_blocks("cols", cols);
  if (along == Axis::kColumn) check_blocks("rows", rows);
  if (!has_work(groups, cols)) return;
  check_not_null("src", src);
  check_not_null("dst", dst);
  if (src == dst) refuse("dst", "src", "a buffer of its own: tiles move past each other");
  const py::gil_scoped_release release;
  swizzle_scales(pointer<std::uint8_t>(src), pointer<std::uint8_t>(dst), along, groups, cols,
                 inverse);
}

void sum_columns(Address src, int src_dtype, std::int64_t rows, std::int64_t cols,
                 std::int64_t row_stride, Address weights, bool weighted, Address splits,
                 std::int64_t num_groups, Address out, int threads) {
  const Source source = check_source(src, src_dtype, rows, cols, row_stride);
  threads = check_threads(threads);
  const Groups groups = check_splits(splits, num_groups, rows, 1);
  if (cols == 0) return;
  check_not_null("out_f32", out);
  if (has_work(groups, cols)) {
    check_not_null("src", src);
    if (weighted) check_not_null("weights_f32", weights);
  }
  const py::gil_scoped_release release;
  column_sums(source, groups, pointer<const float>(weights), pointer<float>(out), threads);
}

void bind_column_sums(Address src, int src_dtype, std::int64_t rows, std::int64_t cols,
                      std::int64_t row_stride, Address splits, std::int64_t num_groups, Address out,
                      int threads) {
  sum_columns(src, src_dtype, rows, cols, row_stride, 0, false, splits, num_groups, out, threads);
}

void bind_weighted_column_sums(Address src, int src_dtype, std::int64_t rows, std::int64_t cols,
                               std::int64_t row_stride, Address weights, Address splits,
                               std::int64_t num_groups, Address out, int threads) {
  sum_columns(src, src_dtype, rows, cols, row_stride, weights, true, splits, num_groups, out,
              threads);
}

void bind_row_dots(Address src, int src_dtype, std::int64_t rows, std::int64_t cols,
                   std::int64_t row_stride, Address table, Address splits, std::int64_t num_groups,
                   Address out, int threads) {
  const Source source = check_source(src, src_dtype, rows, cols, row_stride);
  threads = check_threads(threads);
  const Groups groups = check_splits(splits, num_groups, rows, 1);
  if (!has_work(groups, 1)) return;
  check_not_null("out_f32", out);
  if (cols > 0) {
    check_not_null("src", src);
    check_not_null("table_f32", table);
  }
  const py::gil_scoped_release release;
  row_dots(source, groups, pointer<const float>(table), pointer<float>(out), threads);
}

constexpr const char* kModuleDoc =
    "CPU kernels of te-grouped-mlp.\n\n"
    "Pointers are integers (tensor.data_ptr()); 0 means not wanted. Nothing is allocated for the\n"
    "caller and nothing is kept. Source dtypes: F32=0, F16=1, BF16=2, F64=3. FP8 formats: E4M3=0,\n"
    "E5M2=1. Axes: ROW=0 (1x32 blocks), COLUMN=1 (32x1 blocks). splits: host address of\n"
    "int64[num_groups] row counts, or 0 with num_groups=0 for one dense group; with splits only\n"
    "the rows before their sum are read or written. threads=0 decides: at most torch's number and\n"
    "the CPUs of the process. A bad argument raises ValueError before any work. Results do not "
    "depend on the SIMD level or the thread count.";

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

constexpr const char* kSpacingDoc =
    "Bytes from each tensor to the next, 0 where they differ or for one tensor; None unless all\n"
    "have one shape, strides, element type and device, or where that cannot be seen. table is\n"
    "torch.Tensor.__dlpack_c_exchange_api__; tensors a list or tuple of exactly the two types.";

py::object bind_spacing(py::handle table, py::handle tensors, py::handle tensor_type,
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
  const Spacing found = spacing(*api, reinterpret_cast<void* const*>(items), count);
  PyErr_Clear();
  if (!found.uniform) return py::none();
  return py::int_(found.distance);
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
  module.def("spacing", &bind_spacing, kSpacingDoc, py::arg("table"), py::arg("tensors"),
             py::arg("tensor_type"), py::arg("parameter_type"));
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
