// Functions of torch's that end the process where a tensor's form or memory cannot be read, as those of a nested one:
// they throw, and nothing of Python catches what C++ throws.

#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <exception>

// A tensor that the guards cannot read is unlike the known ones.

// `check` is called without the interpreter in between, whose state an exception would leave broken.
extern "C" PyObject *alike(PyObject *check, PyObject *tensors) {
  PyCFunction function = PyCFunction_GetFunction(check);
  if (function == nullptr) return nullptr;
  try {
    return reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(function))(
        PyCFunction_GetSelf(check), tensors, nullptr);
  } catch (const std::exception &) {
    PyErr_Clear();
    return Py_NewRef(Py_False);
  }
}

static PyMethodDef method = {"alike", alike, METH_VARARGS, "Whether the tensors have the forms of those known."};

extern "C" PyObject *guarded_by(PyObject *guard) {
  return PyCFunction_Check(guard) && PyCFunction_GetFunction(guard) == alike ? PyCFunction_GetSelf(guard) : nullptr;
}

extern "C" PyObject *guard_of(PyObject *, PyObject *check) {
  if (PyCFunction_GetFlags(check) != (METH_VARARGS | METH_KEYWORDS)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "guard: not a method of torch's guards");
    return nullptr;
  }
  return PyCFunction_NewEx(&method, check, nullptr);
}

extern "C" int address_by(unsigned long long function, PyObject *tensor, uint64_t *address) {
  try {
    *address = reinterpret_cast<uint64_t>(reinterpret_cast<void *(*)(PyObject *)>(function)(tensor));
    return 1;
  } catch (const std::exception &) {
    PyErr_SetString(PyExc_RuntimeError, "the tensor has no memory");
    return -1;
  }
}
