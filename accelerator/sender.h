// One launch of a plan: the parameters that change are written into a copy of the others, and the driver is called.
#pragma once

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

enum { MOST_BYTES = 4096, ALIGNMENT = 128, MOST_FIELDS = 64 };
enum { MOST_SLOTS = 96, MOST_TENSORS = 32, MOST_LAUNCHES = 4, MOST_KEYED = 4, MOST_FACTORS = 8 };

typedef int (*LaunchKernelEx)(const void *config, void *function, void **parameters, void **extra);
typedef int (*ReplaceAddress)(void *tensor_map, void *address);

// Tables come as bytes, which Python packs as the compiler lays these structs out (launch/accelerator.py).
typedef struct {
  uint32_t offset;
  char code;  // as in Python's struct module, or MAP: a descriptor, which gets another address
} Field;

enum { MAP = 'M' };

// What a field gets: a Python number, or where that is NULL an address, or a product.
typedef struct {
  PyObject *number;
  uint64_t address;
  double product;
} Value;

typedef struct {
  PyObject_HEAD
  LaunchKernelEx call;
  ReplaceAddress replace;
  const void *config;  // a CUlaunchConfig, which nobody writes
  void *function;
  PyObject *parameters, *fields;  // bytes
  PyObject *launch, *stream, *ring, *kept;
  Py_ssize_t size, count;
  const char *bytes;
  const Field *field;
} Sender;

// A tensor as DLPack's `DLTensor` describes it, and what reads one: 0, or -1 with a Python error.
typedef struct {
  void *data;
  int32_t device_type, device, dims;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t offset;
} Tensor;
typedef int (*ReadTensor)(void *object, Tensor *tensor);

// The form of tensors: a class, which lives as long as its module, device, dtype, and sizes and strides, of which
// negative ones are any.
enum { MOST_DIMS = 6 };
typedef struct {
  PyTypeObject *type;
  int32_t device_type, device, dims;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t shape[MOST_DIMS], strides[MOST_DIMS];
} Form;

int start_forms(void);

uint64_t address_of(const Tensor *tensor);

// What reads the tensors of a class, by its `__dlpack_c_exchange_api__`; NULL: a Python error is set.
ReadTensor reader_of(PyObject *capsule);

// Read an object. SENT: it is a tensor of that form; UNLIKE: it is none, or, in grad mode, requires grad.
int read_tensor(ReadTensor read, const Form *form, PyObject *object, int grad_mode, Tensor *tensor);

// `readable`, `form` and `alike` of the module.
PyObject *is_readable(PyObject *module, PyObject *capsule);
PyObject *form_of(PyObject *module, PyObject *arguments);
PyObject *alike_of(PyObject *module, PyObject *known);

// Whether a value, which is let go, is true; FAILED if it is NULL.
int truth(PyObject *value);

// A function that tells whether a stream is the same and does not capture: `same_stream` of the module.
PyObject *same_stream(PyObject *module, PyObject *query);

// The references of an object, which lie in it one behind another.
typedef struct {
  size_t offset, count;
} References;

#define REFERENCES(type, first, last) \
  ((References){offsetof(type, first), (offsetof(type, last) - offsetof(type, first)) / sizeof(PyObject *) + 1})

// Hold references that were parsed into an object, or forget them and the object where parsing failed.
PyObject *hold_all(PyObject *object, References references, int parsed);
int visit_all(PyObject *object, References references, visitproc visit, void *arg);
int clear_all(PyObject *object, References references);

// A new object of a type, all zeros.
void *allocate(PyTypeObject *type);

// Give back the memory of an object and what it refers to.
void release(PyObject *object, References references);

extern PyType_Spec sender_spec, walk_spec, paths_spec, ring_spec;

// The last launches. Keep one, with a copy of its parameters.
typedef struct Ring Ring;
int is_ring(PyObject *object);
void note(Ring *ring, PyObject *launch, PyObject *stream, const char *parameters, Py_ssize_t size);

typedef struct Walk Walk;
enum { FAILED = -1, OTHERWISE = 0, SENT = 1, UNLIKE = 2 };

// Walk the table of a call with these arguments; there is room for MOST_SLOTS and a tensor that is made. SENT: `result`
// is a new reference to what the call gives; UNLIKE: it is of another form; OTHERWISE: nothing was sent, and Python
// walks the table.
int walk(Walk *self, PyObject **slots, PyObject **result);

// A tuple of objects that are borrowed.
PyObject *tuple_of(PyObject *const *items, Py_ssize_t count);

// Call a callable with one argument.
PyObject *call_one(PyObject *callable, PyObject *argument);

// The parameters of a launch, its own, so that threads need no lock.
typedef struct {
  _Alignas(ALIGNMENT) unsigned char bytes[MOST_BYTES];
} Parameters;

// Write the parameters with these values, one for each field; -1: a Python error is set.
int fill(const Sender *sender, const Value *values, Parameters *parameters);

// Launch with these parameters; the driver's CUresult.
int launch(const Sender *sender, Parameters *parameters);
