// SPDX-License-Identifier: Apache-2.0
// Launch kernels from Python for arguments whose form was seen before. No torch headers are used: tensors are read
// through DLPack's exchange table, which torch offers on its type. It has a stable Python ABI and allocates nothing.
//
// Every decision is made in torch_tile/runtime/cuda_launch.py. It is called for each new form of arguments (dtypes,
// devices, sizes, strides) and for everything unusual, and leaves a plan for later calls.

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "launch_dlpack.h"
#include "launch_driver.h"

namespace {

using namespace tile;
using IsNegative = bool (*)(void* const*);  // at::native::is_neg(const at::Tensor&); a Tensor is a pointer to a TensorImpl

constexpr int kMostInline = 5;  // rank up to which a TensorImpl keeps its sizes in itself
constexpr int kMostArguments = 64, kMostWords = 2048, kMostForms = 1024, kSlots = 2 * kMostForms;
constexpr int kMostPlanWords = 8192;  // 64 KiB of the stack; a gradient's 19 launches with 40 tensor maps take 2115
constexpr const char* kName = "torch_tile.kernel";

// A form of arguments, `words` long, and behind it the Plan for it, `plan_words` long.
struct Form {
  uint64_t hash;
  int words, plan_words;
  int64_t data[1];
};

// Python objects of a kernel.
enum { kSlow, kFailed, kIsNegative, kTensor, kParameter, kHeld };

struct Kernel {
  Exchange* exchange;
  Driver driver;
  IsNegative is_negative;  // NULL: ask Python's
  int64_t sizes_offset;  // of the sizes in a TensorImpl, bytes
  PyObject* held[kHeld];
  int count;
  bool scalars_matter;  // launch grids depend on scalar arguments, so they are part of the form
  char kinds[kMostArguments];  // 't' for tensors, else the struct module's letter of a number
  uint64_t masks[kMostArguments];  // bits of an address that must be 0
  unsigned char* disjoint;  // pairs of tensors: one is constant to a kernel, the other is written
  int pairs;
  uint64_t low_bits;  // bits of an address that are part of the form, below 256
  Form* last;
  Form* forms[kSlots];
  int known;
};

struct Arguments {
  uint64_t pointers[kMostArguments + 1], ends[kMostArguments], scalars[kMostArguments];
  int tensors, numbers, words;
  int32_t device_type, device_index;
  int64_t form[kMostWords];
};

// Return whether a tensor is a view whose sign is yet to be turned. Python's `is_neg` costs more than all other reads.
bool is_negative(Kernel* kernel, PyObject* object, const Tensor& tensor) {
  if (kernel->is_negative != NULL && tensor.rank > 0 && tensor.rank <= kMostInline) {
    void* itself = (char*)tensor.shape - kernel->sizes_offset;
    return kernel->is_negative(&itself);
  }
  PyObject* answer = PyObject_CallFunctionObjArgs(kernel->held[kIsNegative], object, NULL);
  if (answer == NULL) PyErr_Clear();
  Py_XDECREF(answer);
  return answer != Py_False;
}

// Each reader returns false for arguments that it leaves to Python.
bool read_tensor(Kernel* kernel, PyObject* object, uint64_t mask, Arguments* into) {
  PyObject* type = (PyObject*)Py_TYPE(object);
  if (type != kernel->held[kTensor] && type != kernel->held[kParameter]) return false;
  Tensor tensor;
  if (kernel->exchange->tensor_from_object(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (into->words + 1 + 2 * tensor.rank > kMostWords) return false;
  uint64_t address = (uint64_t)tensor.data + tensor.byte_offset;
  int64_t* form = into->form + into->words;
  *form++ = tensor.code | (int64_t)tensor.bits << 8 | (int64_t)tensor.lanes << 16 | (int64_t)tensor.device_type << 32 |
            (int64_t)(tensor.device_index & 255) << 40 | (int64_t)(address & kernel->low_bits) << 48 |
            (int64_t)tensor.rank << 56;
  bool empty = false;
  int64_t last = 0;  // element
  for (int d = 0; d < tensor.rank; ++d) {
    last += (tensor.shape[d] - 1) * tensor.strides[d];
    *form++ = tensor.shape[d];
    *form++ = tensor.strides[d];
    empty |= tensor.shape[d] == 0;
  }
  into->words = (int)(form - into->form);
  if ((address & mask) || (address == 0 && !empty)) return false;
  if ((tensor.code == kFloat || tensor.code == kBfloat) && is_negative(kernel, object, tensor)) return false;
  if (into->tensors == 0) {
    into->device_type = tensor.device_type;
    into->device_index = tensor.device_index;
  }
  into->ends[into->tensors] = empty ? address : address + (uint64_t)(last + 1) * ((tensor.bits * tensor.lanes + 7) / 8);
  into->pointers[into->tensors++] = address;
  return true;
}

bool fits(int64_t value, char kind) {
  switch (kind) {
    case '?': return value == 0 || value == 1;
    case 'b': return value == (int8_t)value;
    case 'h': return value == (int16_t)value;
    case 'i': return value == (int32_t)value;
    case 'q': return true;
    case 'B': return value == (uint8_t)value;
    case 'H': return value == (uint16_t)value;
    case 'I': return value == (uint32_t)value;
    case 'Q': return value >= 0;
    default: return false;
  }
}

bool read_number(PyObject* object, char kind, uint64_t* into) {
  if (kind == 'f' || kind == 'd') {
    if (!PyFloat_Check(object) && !PyLong_Check(object)) return false;
    double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    float narrow = (float)value;
    *into = 0;
    memcpy(into, kind == 'f' ? (void*)&narrow : (void*)&value, kind == 'f' ? 4 : 8);
    return true;
  }
  if (!PyLong_Check(object)) return false;
  int overflow = 0;
  int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  *into = (uint64_t)value;
  return !overflow && fits(value, kind);
}

bool read(Kernel* kernel, PyObject* const* objects, Py_ssize_t count, Arguments* into) {
  into->tensors = into->numbers = into->words = 0;
  if (count != kernel->count) return false;
  for (int i = 0; i < kernel->count; ++i) {
    if (kernel->kinds[i] == 't') {
      if (!read_tensor(kernel, objects[i], kernel->masks[i], into)) return false;
    } else {
      uint64_t* number = into->scalars + into->numbers++;
      if (!read_number(objects[i], kernel->kinds[i], number)) return false;
      if (kernel->scalars_matter) {
        if (into->words == kMostWords) return false;
        into->form[into->words++] = (int64_t)*number;
      }
    }
  }
  return into->tensors > 0;
}

// Whether the bytes from the first to the last of tensors that must not overlap do so.
bool meet(const Kernel* kernel, const Arguments& arguments) {
  for (int i = 0; i < kernel->pairs; ++i) {
    int a = kernel->disjoint[2 * i], b = kernel->disjoint[2 * i + 1];
    if (arguments.pointers[a] < arguments.ends[b] && arguments.pointers[b] < arguments.ends[a]) return true;
  }
  return false;
}

uint64_t hash_of(const Arguments& arguments) {
  uint64_t hash = (uint64_t)arguments.words;
  for (int i = 0; i < arguments.words; ++i) {
    hash = (hash ^ (uint64_t)arguments.form[i]) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return hash;
}

bool is_form(const Form* form, const Arguments& arguments) {
  return form->words == arguments.words && memcmp(form->data, arguments.form, 8 * arguments.words) == 0;
}

// The place of a form in the table: where it is, or the free place where it belongs.
Form** place(Kernel* kernel, const Arguments& arguments, uint64_t hash) {
  for (uint64_t at = hash % kSlots;; at = (at + 1) % kSlots) {
    Form* form = kernel->forms[at];
    if (form == NULL || (form->hash == hash && is_form(form, arguments))) return &kernel->forms[at];
  }
}

void forget(Kernel* kernel) {
  for (Form*& form : kernel->forms) {
    free(form);
    form = NULL;
  }
  kernel->last = NULL;
  kernel->known = 0;
}

// Follow a plan. It is copied first: while the driver is at work, other Python threads may change the table.
int follow(const Kernel* kernel, const Form* form, Arguments* arguments, void* stream) {
  int64_t words[kMostPlanWords];
  memcpy(words, form->data + form->words, 8 * form->plan_words);
  Plan* plan = (Plan*)words;
  PyThreadState* thread = PyEval_SaveThread();
  void *context = (void*)plan->context, *before = NULL;
  int status = kernel->driver.get_context(&before);
  if (status == 0 && before != context) status = kernel->driver.set_context(context);
  if (status == 0) status = follow(kernel->driver, plan, arguments->pointers, arguments->scalars, stream);
  if (before != context) kernel->driver.set_context(before);
  PyEval_RestoreThread(thread);
  return status;
}

PyObject* in_python(PyObject* function, PyObject* const* objects, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  if (tuple == NULL) return NULL;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_INCREF(objects[i]);
    PyTuple_SetItem(tuple, i, objects[i]);
  }
  PyObject* result = PyObject_Call(function, tuple, NULL);
  Py_DECREF(tuple);
  return result;
}

PyObject* launch(PyObject* self, PyObject* const* objects, Py_ssize_t count) {
  Kernel* kernel = (Kernel*)PyCapsule_GetPointer(self, kName);
  if (kernel == NULL) return NULL;
  Arguments arguments;
  if (!read(kernel, objects, count, &arguments) || meet(kernel, arguments))
    return in_python(kernel->held[kSlow], objects, count);
  Form* form = kernel->last;
  if (form == NULL || !is_form(form, arguments)) {
    form = *place(kernel, arguments, hash_of(arguments));
    if (form == NULL) return in_python(kernel->held[kSlow], objects, count);
    kernel->last = form;
  }
  Workspace workspace;
  Plan* plan = (Plan*)(form->data + form->words);
  int64_t bytes = plan->workspace;
  if (bytes > 0 && !workspace.allocate(*kernel->exchange, arguments.device_type, arguments.device_index, bytes))
    return in_python(kernel->held[kSlow], objects, count);
  arguments.pointers[arguments.tensors] = workspace.address();
  if (bring_maps(kernel->driver, plan, arguments.pointers) != 0) return in_python(kernel->held[kSlow], objects, count);
  void* stream = NULL;
  if (kernel->exchange->current_stream(arguments.device_type, arguments.device_index, &stream) != 0) return NULL;
  int status = follow(kernel, form, &arguments, stream);
  if (status != 0) return PyObject_CallFunction(kernel->held[kFailed], "i", status);
  Py_RETURN_NONE;
}

// remember(kernel, arguments, plan): follow `plan`, 64-bit numbers, from now on for arguments of this form.
PyObject* remember(PyObject*, PyObject* args) {
  PyObject *capsule, *given;
  const char* plan;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(args, "OO!y#", &capsule, &PyTuple_Type, &given, &plan, &bytes)) return NULL;
  Kernel* kernel = (Kernel*)PyCapsule_GetPointer(capsule, kName);
  if (kernel == NULL) return NULL;
  PyObject* objects[kMostArguments];
  Py_ssize_t count = PyTuple_Size(given);
  for (Py_ssize_t i = 0; i < count && i < kMostArguments; ++i) objects[i] = PyTuple_GetItem(given, i);
  Arguments arguments;
  if (bytes > 8 * kMostPlanWords || !read(kernel, objects, count, &arguments)) Py_RETURN_FALSE;
  if (kernel->known == kMostForms) forget(kernel);
  uint64_t hash = hash_of(arguments);
  Form** into = place(kernel, arguments, hash);
  size_t size = sizeof(Form) + 8 * (size_t)arguments.words + (size_t)bytes;
  Form* form = *into != NULL ? NULL : (Form*)malloc(size);
  if (form == NULL) Py_RETURN_FALSE;
  form->hash = hash;
  form->words = arguments.words;
  form->plan_words = (int)(bytes / 8);
  memcpy(form->data, arguments.form, 8 * (size_t)arguments.words);
  memcpy(form->data + arguments.words, plan, (size_t)bytes);
  *into = form;
  ++kernel->known;
  Py_RETURN_TRUE;
}

void destroy(PyObject* capsule) {
  Kernel* kernel = (Kernel*)PyCapsule_GetPointer(capsule, kName);
  forget(kernel);
  for (PyObject* each : kernel->held) Py_DECREF(each);
  free(kernel->disjoint);
  free(kernel);
}

PyMethodDef launch_method = {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "Launch on these arguments."};

// sizes_of(exchange, tensor): the address of a tensor's sizes, 0 for tensors that DLPack does not describe.
PyObject* sizes_of(PyObject*, PyObject* args) {
  PyObject *exchange, *object;
  if (!PyArg_ParseTuple(args, "OO", &exchange, &object)) return NULL;
  Exchange* table = (Exchange*)PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
  if (table == NULL) return NULL;
  Tensor tensor = {};
  bool is_known = table->major == 1 && table->tensor_from_object != NULL && table->tensor_from_object(object, &tensor) == 0;
  PyErr_Clear();
  return PyLong_FromVoidPtr(is_known ? (void*)tensor.shape : NULL);
}

// make(exchange, (slow, failed, is_neg, Tensor, Parameter), (functions of Driver, in its order),
//      (at::native::is_neg or 0, offset of sizes), kinds, masks, scalars_matter, low_bits, disjoint)
// -> (launch function, kernel for `remember`), or None if torch's table is of a kind that is not known here.
PyObject* make(PyObject*, PyObject* args) {
  PyObject *exchange, *held[kHeld];
  unsigned long long functions[5], is_negative, sizes_offset, low_bits;
  const char *kinds, *masks, *disjoint;
  Py_ssize_t count, mask_bytes, disjoint_bytes;
  int scalars_matter;
  if (!PyArg_ParseTuple(args, "O(OOOOO)(KKKKK)(KK)y#y#pKy#", &exchange, &held[kSlow], &held[kFailed], &held[kIsNegative],
                        &held[kTensor], &held[kParameter], functions, functions + 1, functions + 2, functions + 3,
                        functions + 4, &is_negative, &sizes_offset, &kinds, &count, &masks, &mask_bytes, &scalars_matter,
                        &low_bits, &disjoint, &disjoint_bytes))
    return NULL;
  Exchange* table = (Exchange*)PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
  if (table == NULL) return NULL;
  if (table->major != 1 || table->tensor_from_object == NULL || count > kMostArguments || mask_bytes != 8 * count)
    Py_RETURN_NONE;
  Kernel* kernel = (Kernel*)calloc(1, sizeof(Kernel));
  if (kernel == NULL) return PyErr_NoMemory();
  kernel->exchange = table;
  static_assert(sizeof(Driver) == sizeof functions, "one address for each function");
  memcpy(&kernel->driver, functions, sizeof functions);
  kernel->is_negative = (IsNegative)is_negative;
  kernel->sizes_offset = (int64_t)sizes_offset;
  kernel->count = (int)count;
  kernel->scalars_matter = scalars_matter;
  kernel->low_bits = low_bits;
  memcpy(kernel->kinds, kinds, (size_t)count);
  memcpy(kernel->masks, masks, (size_t)mask_bytes);
  kernel->disjoint = (unsigned char*)malloc((size_t)disjoint_bytes + 1);
  if (kernel->disjoint == NULL) {
    free(kernel);
    return PyErr_NoMemory();
  }
  memcpy(kernel->disjoint, disjoint, (size_t)disjoint_bytes);
  kernel->pairs = (int)(disjoint_bytes / 2);
  for (int i = 0; i < kHeld; ++i) {
    Py_INCREF(held[i]);
    kernel->held[i] = held[i];
  }
  PyObject* capsule = PyCapsule_New(kernel, kName, destroy);
  PyObject* function = capsule == NULL ? NULL : PyCFunction_NewEx(&launch_method, capsule, NULL);
  return function == NULL ? NULL : Py_BuildValue("NN", function, capsule);
}

PyMethodDef methods[] = {
    {"make", make, METH_VARARGS, "A launch function and its kernel."},
    {"sizes_of", sizes_of, METH_VARARGS, "The address of a tensor's sizes."},
    {"remember", remember, METH_VARARGS, "Follow a plan for arguments of this form."},
    {NULL, NULL, 0, NULL},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "torch_tile_launch", "Launches CUDA kernels.", -1, methods, NULL, NULL, NULL, NULL};

}  // namespace

PyMODINIT_FUNC PyInit_torch_tile_launch(void) { return PyModule_Create(&module); }
