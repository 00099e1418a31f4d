// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <Python.h>

#include <cstdint>

namespace te_grouped_mlp {

struct Spacing {
  // Whether all tensors have one shape, strides, element type and device. False also where that
  // cannot be seen: an unknown table, a subclass, a tensor that DLPack does not describe.
  bool uniform;
  // Bytes from each tensor to the next; 0 where that differs, or for a single tensor.
  std::int64_t distance;
};

// `table` is torch.Tensor.__dlpack_c_exchange_api__; `tensors` a list or a tuple, which must not
// change meanwhile: the caller holds the GIL. Leaves no Python error set; reads no element.
Spacing spacing(PyObject* table, PyObject* tensors, PyTypeObject* tensor_type,
                PyTypeObject* parameter_type);

}  // namespace te_grouped_mlp
