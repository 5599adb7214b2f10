// Tensors are read through DLPack's C exchange API, and their forms compared with known ones.
// The structs are those of dlpack.h, version 1 (https://github.com/dmlc/dlpack).

#include "sender.h"

#include <string.h>

enum { DLPACK_MAJOR = 1, INTEGER_CODES = 2, FLOAT_CODE = 2 };  // codes of dtypes: int 0, uint 1, float 2, others above

typedef struct {
  uint32_t major, minor;
  const void *older, *allocate, *own, *give;
  ReadTensor read;
} ExchangeApi;

static PyObject *requires_grad, *is_neg;  // names, set once

int start_forms(void) {
  requires_grad = PyUnicode_InternFromString("requires_grad");
  is_neg = PyUnicode_InternFromString("is_neg");
  return requires_grad == NULL || is_neg == NULL ? -1 : 0;
}

ReadTensor reader_of(PyObject *capsule) {
  const ExchangeApi *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (api != NULL && api->major == DLPACK_MAJOR) return api->read;
  if (api != NULL) PyErr_Format(PyExc_ValueError, "DLPack %u.%u, expected %d", api->major, api->minor, DLPACK_MAJOR);
  return NULL;
}

PyObject *is_readable(PyObject *module, PyObject *capsule) {
  ReadTensor read = reader_of(capsule);
  PyErr_Clear();
  return PyBool_FromLong(read != NULL);
}

uint64_t address_of(const Tensor *tensor) { return (uint64_t)(uintptr_t)tensor->data + tensor->offset; }

int truth(PyObject *value) {
  if (value == NULL) return FAILED;
  int is = value == Py_True ? 1 : value == Py_False ? 0 : PyObject_IsTrue(value);
  Py_DECREF(value);
  return is;
}

static int has_form(const Tensor *tensor, const Form *form) {
  if (tensor->device_type != form->device_type || tensor->device != form->device) return 0;
  if (tensor->dims != form->dims) return 0;
  if (tensor->code != form->code || tensor->bits != form->bits || tensor->lanes != form->lanes) return 0;
  for (int i = 0; i < form->dims; i++) {
    if (form->shape[i] >= 0 && tensor->shape[i] != form->shape[i]) return 0;
    if (form->strides[i] >= 0 && tensor->strides[i] != form->strides[i]) return 0;
  }
  return 1;
}

// A tensor of a function transform, a sparse or a nested one cannot be read. What torch shows nowhere else: gradients,
// which integers have none of, and lazy negation, which public functions give to the parts of complex numbers alone.
int read_tensor(ReadTensor read, const Form *form, PyObject *object, int grad_mode, Tensor *tensor) {
  if (Py_TYPE(object) != form->type) return UNLIKE;
  if (read(object, tensor)) {
    PyErr_Clear();
    return UNLIKE;
  }
  if (!has_form(tensor, form)) return UNLIKE;
  int odd = 0;
  if (tensor->code == FLOAT_CODE) odd = truth(PyObject_CallMethodObjArgs(object, is_neg, NULL));
  if (!odd && grad_mode && tensor->code >= INTEGER_CODES) odd = truth(PyObject_GetAttr(object, requires_grad));
  return odd < 0 ? FAILED : odd ? UNLIKE : SENT;
}

PyObject *form_of(PyObject *module, PyObject *arguments) {
  PyObject *capsule, *object;
  if (!PyArg_ParseTuple(arguments, "OO", &capsule, &object)) return NULL;
  ReadTensor read = reader_of(capsule);
  Tensor tensor;
  if (read == NULL || read(object, &tensor)) return NULL;
  if (tensor.dims > MOST_DIMS) return PyErr_Format(PyExc_ValueError, "%d dimensions", tensor.dims);
  Form form = {Py_TYPE(object), tensor.device_type, tensor.device, tensor.dims, tensor.code, tensor.bits, tensor.lanes,
               {0}, {0}};
  memcpy(form.shape, tensor.shape, (size_t)tensor.dims * sizeof *form.shape);
  memcpy(form.strides, tensor.strides, (size_t)tensor.dims * sizeof *form.strides);
  return PyBytes_FromStringAndSize((const char *)&form, sizeof form);
}

static PyObject *are_alike(PyObject *known, PyObject *const *objects, Py_ssize_t count) {
  ReadTensor read = reader_of(PyTuple_GetItem(known, 0));
  PyObject *rows = PyTuple_GetItem(known, 2);
  const Form *form = (const Form *)PyBytes_AsString(rows);
  int grad_mode = read == NULL ? FAILED : truth(PyObject_CallNoArgs(PyTuple_GetItem(known, 1)));
  int alike = grad_mode < 0 ? FAILED : (size_t)count * sizeof *form == (size_t)PyBytes_Size(rows) ? SENT : UNLIKE;
  Tensor tensor;
  for (Py_ssize_t i = 0; i < count && alike == SENT; i++) {
    alike = read_tensor(read, &form[i], objects[i], grad_mode, &tensor);
  }
  return alike < 0 ? NULL : PyBool_FromLong(alike == SENT);
}

PyObject *alike_of(PyObject *module, PyObject *known) {
  static PyMethodDef method = {"alike", (PyCFunction)(void (*)(void))are_alike, METH_FASTCALL,
                               "alike(*tensors): whether they have the known forms."};
  PyObject *capsule, *grad_mode, *rows;
  if (!PyArg_ParseTuple(known, "OOS", &capsule, &grad_mode, &rows)) return NULL;
  return PyCFunction_NewEx(&method, known, NULL);
}
