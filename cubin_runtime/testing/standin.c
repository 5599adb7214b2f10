/* A recording stand-in for libcuda, compiled against the real cuda.h.
 *
 * Every function below is defined with the prototype of the header, so a signature that we got wrong does not
 * compile here or shows wrong values in the log. Each call appends one line `name key=value ...` of what arrived,
 * read through the header's own types. Memory is host memory; a "kernel" does nothing.
 *
 * It has several devices: each has a primary context, and tests make further ones. Contexts own streams, modules and
 * functions, and it refuses what a real driver (580.159, two H100s) was seen to refuse: a launch whose stream or
 * function belongs to another context, a launch on a default stream while another context is current, and, beside a
 * capture, the query of a stream's number and, unless the thread's capture mode allows it, what allocates, frees, loads
 * or waits; these also spoil the capture.
 *
 * Control, all called by the tests: standin_reset, standin_set_device, standin_make_context, standin_describe,
 * standin_add_kernel, standin_fail, standin_hide_parameter_info, standin_accept_kernels, standin_make_up_memory,
 * standin_write_whole_descriptors, standin_image, standin_log.
 */
#include <cuda.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOG_BYTES (4u << 20)
#define SLOTS 64
#define KERNELS 4096
#define OBJECTS 4096
#define GRAPHS 256
#define PRIMARY 0xC000
#define MADE 0xC100

struct kernel { char symbol[256]; size_t sizes[8]; int parameters; int max_threads; int max_shared; };
struct failure { char call[64]; int code; int skip; int times; };
struct stream {
  int used; int blocking; int capturing; int spoiled;
  CUstreamCaptureMode mode; pthread_t thread; /* of the capture */
  cuuint64_t capture, number; CUcontext context; struct graph *graph;
};
struct function { struct kernel *kernel; CUmodule module; CUcontext context; };
struct module { CUcontext context; };
struct user_object { void *data; CUhostFn destroy; int references; };
/* A graph and the executables made from it hold the same user objects. */
struct graph { int used, executable; struct user_object *objects[8]; int count; };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char log_text[LOG_BYTES];
static size_t log_used;
static struct kernel kernels[KERNELS];
static int kernel_count;
static struct failure failures[SLOTS];
static int failure_count;
static int sticky;
static struct stream streams[SLOTS];
static struct function functions[OBJECTS];
static struct module modules[OBJECTS];
static struct graph graphs[GRAPHS];
static int function_count, module_count;
static cuuint64_t captures, numbers;
static int made_contexts[16];
static int made_context_count;
static int major, minor, parameter_info, device_count, free_bytes_taken;
static struct { char name[64]; int multiprocessors, shared_per_multiprocessor, shared_per_block, l2, clusters; } model;
static CUdeviceptr made_up_memory;
static int whole_descriptors;
static size_t accepted_size;
static struct { void *data; size_t size; } images[SLOTS];
static int image_count;
static __thread CUcontext context_stack[16];
static __thread int context_depth;
static __thread int epoch_seen;
static __thread CUstreamCaptureMode thread_mode; /* global, as the driver's */
static int epoch;

static void say(const char *format, ...) {
  va_list list;
  va_start(list, format);
  size_t room = LOG_BYTES - log_used;
  int wrote = vsnprintf(log_text + log_used, room, format, list);
  va_end(list);
  if (wrote > 0 && (size_t)wrote < room) log_used += (size_t)wrote;
}

static void say_hex(const void *data, size_t size) {
  for (size_t i = 0; i < size; i++) say("%02x", ((const unsigned char *)data)[i]);
}

/* What devices say of themselves; an empty name stands for the stand-in's own. Sizes in bytes; `clusters` is how many
 * of any kernel's clusters are active at once. */
void standin_describe(const char *name, int multiprocessors, int shared_per_multiprocessor, int shared_per_block,
                      int l2, int clusters) {
  snprintf(model.name, sizeof model.name, "%s", name);
  model.multiprocessors = multiprocessors;
  model.shared_per_multiprocessor = shared_per_multiprocessor; model.shared_per_block = shared_per_block;
  model.l2 = l2; model.clusters = clusters;
}

/* From now on allocations lie at `first` and in steps of 2^40 behind it, with no memory there: nothing that is copied
 * or filled is kept, and what is read is 0. So addresses do not differ from run to run. 0: real memory again. */
void standin_make_up_memory(CUdeviceptr first) { made_up_memory = first; }

/* From now on an encoded descriptor is `struct descriptor`. */
void standin_write_whole_descriptors(void) { whole_descriptors = 1; }

void standin_reset(void) {
  pthread_mutex_lock(&mutex);
  log_used = 0; log_text[0] = 0; kernel_count = failure_count = 0; sticky = 0;
  memset(streams, 0, sizeof streams);
  memset(graphs, 0, sizeof graphs);
  function_count = module_count = made_context_count = 0; numbers = 100;
  accepted_size = 0;
  while (image_count) free(images[--image_count].data);
  major = 9; minor = 0; parameter_info = 1; device_count = 1; free_bytes_taken = 0; captures = 0;
  standin_describe("", 132, 233472, 232448, 52428800, 16);
  made_up_memory = 0; whole_descriptors = 0;
  epoch++;
  pthread_mutex_unlock(&mutex);
}

void standin_set_device(int new_major, int new_minor, int count) {
  major = new_major; minor = new_minor; device_count = count;
}

void standin_add_kernel(const char *symbol, const size_t *sizes, int parameters, int max_threads) {
  struct kernel *k = &kernels[kernel_count++];
  memset(k, 0, sizeof *k);
  snprintf(k->symbol, sizeof k->symbol, "%s", symbol);
  memcpy(k->sizes, sizes, sizeof(size_t) * (size_t)parameters);
  k->parameters = parameters; k->max_threads = max_threads;
}

/* Another context of a device, as a program's own or a green one. */
void *standin_make_context(int device) {
  made_contexts[made_context_count] = device;
  return (void *)(size_t)(MADE + made_context_count++);
}

/* From now on every module holds every kernel that is asked for, with one parameter of `size` bytes. */
void standin_accept_kernels(size_t size) { accepted_size = size; }

/* Bytes of the module image number `index` as it was handed over, NULL past the last. */
const void *standin_image(int index, size_t *size) {
  if (index >= image_count) return NULL;
  *size = images[index].size;
  return images[index].data;
}

/* Let the calls of `call` after the next `skip` fail `times` times (-1: always) with `code`. */
void standin_fail(const char *call, int code, int skip, int times) {
  struct failure *f = &failures[failure_count++];
  snprintf(f->call, sizeof f->call, "%s", call);
  f->code = code; f->skip = skip; f->times = times;
}

/* From now on every call that touches the context fails with `code`, as after a fault on the device. */
void standin_fault(int code) { sticky = code; }

void standin_hide_parameter_info(void) { parameter_info = 0; }

const char *standin_log(void) { return log_text; }
void standin_clear_log(void) { log_used = 0; log_text[0] = 0; }

static CUresult outcome(const char *call) {
  /* Asking for or changing the current context still works on a context that is lost. */
  int about_context = !strncmp(call, "cuCtx", 5);
  if (sticky && !about_context) return (CUresult)sticky;
  for (int i = 0; i < failure_count; i++) {
    struct failure *f = &failures[i];
    if (strcmp(f->call, call)) continue;
    if (f->skip > 0) { f->skip--; continue; }
    if (f->times == 0) continue;
    if (f->times > 0) f->times--;
    return (CUresult)f->code;
  }
  return CUDA_SUCCESS;
}

/* Enter a call: lock, find out whether it is to fail, and leave early if so. */
#define ENTER(name) \
  pthread_mutex_lock(&mutex); \
  if (epoch_seen != epoch) { epoch_seen = epoch; context_depth = 0; thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL; } \
  CUresult result = outcome(name); \
  if (result != CUDA_SUCCESS) { say(name " failed=%d\n", (int)result); goto out; }
/* What allocates, frees, loads or waits is refused beside captures that forbid it to this thread, and spoils them. */
#define UNSAFE do { if (spoils_captures()) REFUSE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); } while (0);
#define LEAVE \
  out: \
  pthread_mutex_unlock(&mutex); \
  return result;
#define REFUSE(code) do { result = (code); goto out; } while (0)

static int spoils_captures(void) {
  int found = 0;
  for (int i = 0; i < SLOTS && thread_mode != CU_STREAM_CAPTURE_MODE_RELAXED; i++) {
    struct stream *s = &streams[i];
    int mine = pthread_equal(s->thread, pthread_self());
    int others = thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && s->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (s->capturing && (mine ? s->mode != CU_STREAM_CAPTURE_MODE_RELAXED : others)) found = s->spoiled = 1;
  }
  return found;
}

static int device_of(CUcontext context) {
  size_t handle = (size_t)context;
  return handle >= MADE ? made_contexts[handle - MADE] : (int)(handle - PRIMARY);
}
static CUcontext current(void) { return context_depth ? context_stack[context_depth - 1] : NULL; }
static struct stream *stream_of(CUstream stream) {
  size_t index = (size_t)stream - 0x5000;
  return stream && index < SLOTS ? &streams[index] : NULL;
}
/* The legacy default stream and that of each thread belong to whatever context is current. */
static int is_default(CUstream stream) { return (size_t)stream <= 2; }
/* A handle that was never created stands for a stream of the first device: tests make such handles up. */
static CUcontext owner_of(const struct stream *s) { return s && s->used ? s->context : (CUcontext)PRIMARY; }
static CUresult context_of_stream(CUstream stream, CUcontext *context) {
  if (is_default(stream)) {
    *context = current();
    return *context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
  }
  struct stream *s = stream_of(stream);
  if (s && s->capturing) { s->spoiled = 1; return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; }
  *context = owner_of(s);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuInit(unsigned int flags) {
  ENTER("cuInit")
  say("cuInit flags=%u\n", flags);
  if (!device_count) REFUSE(CUDA_ERROR_NO_DEVICE);
  LEAVE
}
CUresult CUDAAPI cuDriverGetVersion(int *version) {
  ENTER("cuDriverGetVersion")
  *version = 13000;
  LEAVE
}

struct word { CUresult code; const char *name; const char *text; };
static const struct word words[] = {
  {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
  {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
  {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
  {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
  {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available"},
  {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
  {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
  {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
  {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
   "operation not permitted when stream is capturing"},
};
static const struct word *word_of(CUresult code) {
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    if (words[i].code == code) return &words[i];
  return NULL;
}
CUresult CUDAAPI cuGetErrorName(CUresult error, const char **text) {
  const struct word *w = word_of(error);
  *text = w ? w->name : NULL;
  return w ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
  const struct word *w = word_of(error);
  *text = w ? w->text : NULL;
  return w ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuDeviceGetCount(int *count) {
  ENTER("cuDeviceGetCount")
  *count = device_count;
  LEAVE
}
CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
  ENTER("cuDeviceGet")
  if (ordinal < 0 || ordinal >= device_count) REFUSE(CUDA_ERROR_INVALID_DEVICE);
  *device = ordinal;
  LEAVE
}
CUresult CUDAAPI cuDeviceGetName(char *name, int length, CUdevice device) {
  ENTER("cuDeviceGetName")
  if (*model.name) snprintf(name, (size_t)length, "%s", model.name);
  else snprintf(name, (size_t)length, "stand-in %d (SM %d.%d)", device, major, minor);
  LEAVE
}
CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  ENTER("cuDeviceGetAttribute")
  (void)device;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = model.multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = model.l2; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = model.shared_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = model.shared_per_block; break;
    default: REFUSE(CUDA_ERROR_INVALID_VALUE);
  }
  LEAVE
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain")
  *context = (CUcontext)(size_t)(PRIMARY + device);
  say("cuDevicePrimaryCtxRetain device=%d\n", device);
  LEAVE
}
CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
  ENTER("cuDevicePrimaryCtxRelease")
  say("cuDevicePrimaryCtxRelease device=%d\n", device);
  LEAVE
}
CUresult CUDAAPI cuCtxGetCurrent(CUcontext *context) {
  ENTER("cuCtxGetCurrent")
  *context = current();
  LEAVE
}
CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
  ENTER("cuCtxSetCurrent")
  say("cuCtxSetCurrent context=%p\n", (void *)context);
  if (!context) { if (context_depth) context_depth--; }
  else if (context_depth) context_stack[context_depth - 1] = context;
  else context_stack[context_depth++] = context;
  LEAVE
}
CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  ENTER("cuCtxPushCurrent")
  say("cuCtxPushCurrent context=%p\n", (void *)context);
  context_stack[context_depth++] = context;
  LEAVE
}
CUresult CUDAAPI cuCtxPopCurrent(CUcontext *context) {
  ENTER("cuCtxPopCurrent")
  if (!context_depth) REFUSE(CUDA_ERROR_INVALID_CONTEXT);
  *context = context_stack[--context_depth];
  say("cuCtxPopCurrent context=%p\n", (void *)*context);
  LEAVE
}
CUresult CUDAAPI cuCtxGetDevice(CUdevice *device) {
  ENTER("cuCtxGetDevice")
  if (!current()) REFUSE(CUDA_ERROR_INVALID_CONTEXT);
  *device = (CUdevice)device_of(current());
  LEAVE
}

CUresult CUDAAPI cuMemGetInfo(size_t *free_bytes, size_t *total) {
  ENTER("cuMemGetInfo")
  *total = (size_t)80 << 30;
  *free_bytes = *total - (size_t)free_bytes_taken;
  LEAVE
}
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *address, size_t size) {
  ENTER("cuMemAlloc")
  UNSAFE
  if (!current()) REFUSE(CUDA_ERROR_INVALID_CONTEXT);
  void *memory = NULL;
  if (made_up_memory) {
    *address = made_up_memory;
    made_up_memory += (CUdeviceptr)1 << 40;
    say("cuMemAlloc size=%zu address=%llx context=%p\n", size, *address, (void *)current());
    goto out;
  }
  if (size <= (size_t)1 << 34) memory = aligned_alloc(256, (size + 255) & ~(size_t)255);
  if (!memory) REFUSE(CUDA_ERROR_OUT_OF_MEMORY);
  memset(memory, 0xA5, size);
  *address = (CUdeviceptr)memory;
  say("cuMemAlloc size=%zu address=%llx context=%p\n", size, *address, (void *)current());
  LEAVE
}
CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
  ENTER("cuMemFree")
  UNSAFE
  say("cuMemFree address=%llx\n", address);
  if (!made_up_memory) free((void *)address);
  LEAVE
}
CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) {
  ENTER("cuMemcpyHtoD")
  UNSAFE
  if (!made_up_memory) memcpy((void *)to, from, size);
  LEAVE
}
CUresult CUDAAPI cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) {
  ENTER("cuMemcpyDtoH")
  UNSAFE
  if (made_up_memory) memset(to, 0, size);
  else memcpy(to, (const void *)from, size);
  LEAVE
}
CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  ENTER("cuMemcpyDtoDAsync")
  say("cuMemcpyDtoDAsync size=%zu stream=%p\n", size, (void *)stream);
  if (!made_up_memory) memmove((void *)to, (const void *)from, size);
  LEAVE
}
CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
  ENTER("cuMemsetD8Async")
  say("cuMemsetD8Async value=%u count=%zu stream=%p\n", value, count, (void *)stream);
  if (!made_up_memory) memset((void *)address, value, count);
  LEAVE
}
CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr address, unsigned int value, size_t count, CUstream stream) {
  ENTER("cuMemsetD32Async")
  say("cuMemsetD32Async value=%u count=%zu stream=%p\n", value, count, (void *)stream);
  for (size_t i = 0; i < count && !made_up_memory; i++) ((unsigned int *)address)[i] = value;
  LEAVE
}

CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned int flags) {
  ENTER("cuStreamCreate")
  int i = 0;
  while (i < SLOTS && streams[i].used) i++;
  if (i == SLOTS) REFUSE(CUDA_ERROR_OUT_OF_MEMORY);
  if (!current()) REFUSE(CUDA_ERROR_INVALID_CONTEXT);
  streams[i].used = 1;
  streams[i].number = ++numbers;
  streams[i].context = current();
  streams[i].blocking = !(flags & CU_STREAM_NON_BLOCKING);
  *stream = (CUstream)(size_t)(0x5000 + i);
  say("cuStreamCreate flags=%u stream=%p\n", flags, (void *)*stream);
  LEAVE
}
CUresult CUDAAPI cuStreamGetId(CUstream stream, unsigned long long *number) {
  ENTER("cuStreamGetId")
  CUcontext context;
  result = context_of_stream(stream, &context);
  if (result != CUDA_SUCCESS) goto out;
  const struct stream *s = stream_of(stream);
  if (is_default(stream)) /* one legacy stream a context, and one more for each thread */
    *number = (size_t)context * 1000 + ((size_t)stream == 2 ? 1 + (size_t)pthread_self() % 997 : 0);
  else
    *number = s && s->used ? s->number : (size_t)stream;
  LEAVE
}
CUresult CUDAAPI cuStreamGetCtx(CUstream stream, CUcontext *context) {
  ENTER("cuStreamGetCtx")
  result = context_of_stream(stream, context);
  LEAVE
}
CUresult CUDAAPI cuStreamDestroy(CUstream stream) {
  ENTER("cuStreamDestroy")
  struct stream *s = stream_of(stream);
  if (!s || !s->used) REFUSE(CUDA_ERROR_INVALID_HANDLE);
  memset(s, 0, sizeof *s);
  LEAVE
}
CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
  ENTER("cuStreamSynchronize")
  UNSAFE
  say("cuStreamSynchronize stream=%p\n", (void *)stream);
  LEAVE
}
CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  ENTER("cuStreamIsCapturing")
  if (is_default(stream) && !current()) REFUSE(CUDA_ERROR_INVALID_CONTEXT);
  struct stream *s = stream_of(stream);
  *status = s && s->capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  for (int i = 0; !stream && i < SLOTS; i++)
    if (streams[i].capturing && streams[i].blocking) REFUSE(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  LEAVE
}
CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                        CUgraph *graph, const CUgraphNode **dependencies,
                                        const CUgraphEdgeData **edges, size_t *count) {
  ENTER("cuStreamGetCaptureInfo")
  if (dependencies || edges || count) REFUSE(CUDA_ERROR_INVALID_VALUE);
  if (is_default(stream) && !current()) REFUSE(CUDA_ERROR_INVALID_CONTEXT);
  struct stream *s = stream_of(stream);
  *status = s && s->capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  if (s && s->capturing && id) *id = s->capture;
  if (s && s->capturing && graph) *graph = (CUgraph)s->graph;
  LEAVE
}
CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  ENTER("cuThreadExchangeStreamCaptureMode")
  CUstreamCaptureMode before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  LEAVE
}
CUresult CUDAAPI cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  ENTER("cuStreamBeginCapture")
  struct stream *s = stream_of(stream);
  if (!s) REFUSE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  s->capturing = 1;
  s->capture = ++captures;
  s->spoiled = 0;
  s->mode = mode;
  s->thread = pthread_self();
  int i = 0;
  while (graphs[i].used) i++;
  s->graph = &graphs[i];
  memset(s->graph, 0, sizeof *s->graph);
  s->graph->used = 1;
  say("cuStreamBeginCapture stream=%p mode=%d\n", (void *)stream, (int)mode);
  LEAVE
}
CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  ENTER("cuStreamEndCapture")
  struct stream *s = stream_of(stream);
  if (!s || !s->capturing) REFUSE(CUDA_ERROR_ILLEGAL_STATE);
  s->capturing = 0;
  if (s->spoiled) REFUSE(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  *graph = (CUgraph)s->graph;
  say("cuStreamEndCapture stream=%p graph=%p\n", (void *)stream, (void *)*graph);
  LEAVE
}
CUresult CUDAAPI cuUserObjectCreate(CUuserObject *object, void *data, CUhostFn destroy, unsigned int references,
                                    unsigned int flags) {
  ENTER("cuUserObjectCreate")
  if (flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC || references != 1) REFUSE(CUDA_ERROR_INVALID_VALUE);
  struct user_object *made = malloc(sizeof *made);
  *made = (struct user_object){data, destroy, 1};
  *object = (CUuserObject)made;
  LEAVE
}
CUresult CUDAAPI cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags) {
  ENTER("cuGraphRetainUserObject")
  struct graph *g = (struct graph *)graph;
  if (!g->used || g->count == 8 || count != 1 || flags != CU_GRAPH_USER_OBJECT_MOVE) REFUSE(CUDA_ERROR_INVALID_VALUE);
  g->objects[g->count++] = (struct user_object *)object;
  LEAVE
}
static void drop_graph(struct graph *g) {
  for (int i = 0; i < g->count; i++)
    if (!--g->objects[i]->references) { g->objects[i]->destroy(g->objects[i]->data); free(g->objects[i]); }
  g->used = 0;
}
CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *executable, CUgraph graph, unsigned long long flags) {
  ENTER("cuGraphInstantiate")
  int i = 0;
  while (graphs[i].used) i++;
  graphs[i] = *(struct graph *)graph;
  graphs[i].executable = 1;
  for (int j = 0; j < graphs[i].count; j++) graphs[i].objects[j]->references++;
  *executable = (CUgraphExec)&graphs[i];
  say("cuGraphInstantiate graph=%p flags=%llu\n", (void *)graph, flags);
  LEAVE
}
CUresult CUDAAPI cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  ENTER("cuGraphLaunch")
  say("cuGraphLaunch executable=%p stream=%p\n", (void *)executable, (void *)stream);
  LEAVE
}
CUresult CUDAAPI cuGraphDestroy(CUgraph graph) {
  ENTER("cuGraphDestroy")
  say("cuGraphDestroy graph=%p\n", (void *)graph);
  drop_graph((struct graph *)graph);
  LEAVE
}
CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec executable) {
  ENTER("cuGraphExecDestroy")
  say("cuGraphExecDestroy executable=%p\n", (void *)executable);
  drop_graph((struct graph *)executable);
  LEAVE
}
CUresult CUDAAPI cuEventCreate(CUevent *event, unsigned int flags) {
  ENTER("cuEventCreate")
  *event = (CUevent)(size_t)0x8001;
  say("cuEventCreate flags=%u\n", flags);
  LEAVE
}
CUresult CUDAAPI cuEventDestroy(CUevent event) {
  ENTER("cuEventDestroy")
  say("cuEventDestroy event=%p\n", (void *)event);
  LEAVE
}
CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
  ENTER("cuEventRecord")
  say("cuEventRecord event=%p stream=%p\n", (void *)event, (void *)stream);
  LEAVE
}
CUresult CUDAAPI cuEventSynchronize(CUevent event) {
  ENTER("cuEventSynchronize")
  UNSAFE
  say("cuEventSynchronize event=%p\n", (void *)event);
  LEAVE
}
CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
  ENTER("cuEventElapsedTime")
  say("cuEventElapsedTime start=%p end=%p\n", (void *)start, (void *)end);
  *milliseconds = 1.5f;
  LEAVE
}

/* The call gets no size: an ELF file ends behind its tables and sections. 0 for anything else. */
static size_t elf_bytes(const unsigned char *image) {
  const Elf64_Ehdr *head = (const Elf64_Ehdr *)image;
  if (memcmp(image, ELFMAG, SELFMAG) || head->e_ident[EI_CLASS] != ELFCLASS64) return 0;
  size_t end = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
  size_t programs_end = head->e_phoff + (size_t)head->e_phnum * head->e_phentsize;
  if (head->e_phnum && programs_end > end) end = programs_end;
  for (int i = 0; i < head->e_shnum; i++) {
    const Elf64_Shdr *section = (const Elf64_Shdr *)(image + head->e_shoff + (size_t)i * head->e_shentsize);
    if (section->sh_type != SHT_NOBITS && section->sh_offset + section->sh_size > end)
      end = section->sh_offset + section->sh_size;
  }
  return end;
}

CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image) {
  ENTER("cuModuleLoadData")
  UNSAFE
  if (!current()) REFUSE(CUDA_ERROR_INVALID_CONTEXT);
  size_t size = elf_bytes(image);
  if (size && image_count < SLOTS) {
    images[image_count].data = memcpy(malloc(size), image, size);
    images[image_count++].size = size;
  }
  free_bytes_taken += 4096;
  int i = 0;
  while (i < module_count && modules[i].context) i++; /* the handle of an unloaded module comes back */
  if (i == module_count) module_count++;
  modules[i].context = current();
  *module = (CUmodule)(size_t)(0xD000 + i);
  say("cuModuleLoadData image=%.16s context=%p\n", (const char *)image, (void *)current());
  LEAVE
}
CUresult CUDAAPI cuModuleUnload(CUmodule module) {
  ENTER("cuModuleUnload")
  UNSAFE
  say("cuModuleUnload module=%p\n", (void *)module);
  modules[(size_t)module - 0xD000].context = NULL;
  LEAVE
}
CUresult CUDAAPI cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  ENTER("cuModuleGetFunction")
  UNSAFE
  say("cuModuleGetFunction module=%p name=%s\n", (void *)module, name);
  struct kernel *found = NULL;
  for (int i = 0; i < kernel_count; i++)
    if (!strcmp(kernels[i].symbol, name)) found = &kernels[i];
  if (!found && accepted_size && kernel_count < KERNELS) {
    found = &kernels[kernel_count];
    standin_add_kernel(name, &accepted_size, 1, 1024);
  }
  if (!found || function_count == OBJECTS) REFUSE(CUDA_ERROR_NOT_FOUND);
  for (int i = 0; i < function_count; i++)
    if (functions[i].kernel == found && functions[i].module == module) {
      functions[i].context = modules[(size_t)module - 0xD000].context;
      *function = (CUfunction)&functions[i];
      goto out;
    }
  functions[function_count] = (struct function){found, module, modules[(size_t)module - 0xD000].context};
  *function = (CUfunction)&functions[function_count++];
  LEAVE
}
static struct kernel *kernel_of(CUfunction function) { return ((struct function *)function)->kernel; }
CUresult CUDAAPI cuFuncLoad(CUfunction function) {
  ENTER("cuFuncLoad")
  UNSAFE
  say("cuFuncLoad symbol=%s\n", kernel_of(function)->symbol);
  LEAVE
}
CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  ENTER("cuFuncGetAttribute")
  struct kernel *k = kernel_of(function);
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = k->max_threads; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 128; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = k->max_shared; break;
    default: REFUSE(CUDA_ERROR_INVALID_VALUE);
  }
  LEAVE
}
CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  ENTER("cuFuncSetAttribute")
  struct kernel *k = kernel_of(function);
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) k->max_shared = value;
  say("cuFuncSetAttribute symbol=%s attribute=%d value=%d\n", k->symbol, (int)attribute, value);
  LEAVE
}
CUresult CUDAAPI cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
  ENTER("cuFuncGetParamInfo")
  struct kernel *k = kernel_of(function);
  if (!parameter_info) REFUSE(CUDA_ERROR_NOT_SUPPORTED);
  if (index >= (size_t)k->parameters) REFUSE(CUDA_ERROR_INVALID_VALUE);
  *offset = 0;
  for (size_t i = 0; i < index; i++) *offset += k->sizes[i];
  *size = k->sizes[index];
  LEAVE
}

static void say_config(const CUlaunchConfig *c) {
  say(" grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%p attributes=%u", c->gridDimX, c->gridDimY, c->gridDimZ,
      c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, (void *)c->hStream, c->numAttrs);
  for (unsigned i = 0; i < c->numAttrs; i++) {
    const CUlaunchAttribute *a = &c->attrs[i];
    switch (a->id) {
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        say(" cluster=%u,%u,%u", a->value.clusterDim.x, a->value.clusterDim.y, a->value.clusterDim.z);
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
        say(" policy=%d", (int)a->value.clusterSchedulingPolicyPreference);
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
        say(" pdl=%d", a->value.programmaticStreamSerializationAllowed);
        break;
      default: say(" unknown=%d", (int)a->id);
    }
  }
}

CUresult CUDAAPI cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  ENTER("cuOccupancyMaxActiveClusters")
  say("cuOccupancyMaxActiveClusters symbol=%s", kernel_of(function)->symbol);
  say_config(config);
  say("\n");
  *clusters = model.clusters;
  LEAVE
}
CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                                  void **extra) {
  ENTER("cuLaunchKernelEx")
  CUcontext own = ((struct function *)function)->context;
  CUcontext context = is_default(config->hStream) ? current() : owner_of(stream_of(config->hStream));
  if (!context) { say("refused call=cuLaunchKernelEx\n"); REFUSE(CUDA_ERROR_INVALID_CONTEXT); }
  if (context != own) {
    say("refused call=cuLaunchKernelEx\n");
    REFUSE(CUDA_ERROR_INVALID_HANDLE);
  }
  struct kernel *k = kernel_of(function);
  say("cuLaunchKernelEx symbol=%s context=%p", k->symbol, (void *)context);
  say_config(config);
  say(" extra=%p", (void *)extra);
  for (int i = 0; i < k->parameters; i++) {
    say(" aligned%d=%d parameter%d=", i, (int)((size_t)parameters[i] % 128 == 0), i);
    say_hex(parameters[i], k->sizes[i]);
  }
  say("\n");
  LEAVE
}

static void say_u64(const char *name, const cuuint64_t *values, unsigned count) {
  say(" %s=", name);
  for (unsigned i = 0; i < count; i++) say(i ? ",%llu" : "%llu", (unsigned long long)values[i]);
}
static void say_u32(const char *name, const cuuint32_t *values, unsigned count) {
  say(" %s=", name);
  for (unsigned i = 0; i < count; i++) say(i ? ",%u" : "%u", values[i]);
}
/* The descriptor is not NVIDIA's: its first bytes are the address, enough to tell specs apart; or, if asked for, all
 * arguments as they came, so that the bytes of a launch tell them. */
struct descriptor {
  void *address;
  cuuint64_t dims[5], strides[4];
  unsigned short box[5];
  unsigned char steps[5], rank, type, interleave, swizzle, promotion, fill;
};

CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                        const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                        const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                        CUtensorMapFloatOOBfill fill) {
  ENTER("cuTensorMapEncodeTiled")
  if ((size_t)map % 64) REFUSE(CUDA_ERROR_INVALID_VALUE);
  say("cuTensorMapEncodeTiled type=%d rank=%u address=%p", (int)type, rank, address);
  say_u64("dims", dims, rank);
  say_u64("strides", strides, rank - 1);
  say_u32("box", box, rank);
  say_u32("steps", steps, rank);
  say(" interleave=%d swizzle=%d promotion=%d fill=%d\n", (int)interleave, (int)swizzle, (int)promotion, (int)fill);
  struct descriptor made;
  memset(&made, 0, sizeof made);
  made.address = address;
  for (unsigned i = 0; i < rank && i < 5; i++) {
    made.dims[i] = dims[i]; made.box[i] = (unsigned short)box[i]; made.steps[i] = (unsigned char)steps[i];
    if (i) made.strides[i - 1] = strides[i - 1];
  }
  made.rank = (unsigned char)rank; made.type = (unsigned char)type; made.interleave = (unsigned char)interleave;
  made.swizzle = (unsigned char)swizzle; made.promotion = (unsigned char)promotion; made.fill = (unsigned char)fill;
  memset(map, 0xEE, sizeof *map);
  memcpy(map, &made, whole_descriptors ? sizeof made : sizeof address);
  LEAVE
}

CUresult CUDAAPI cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
  ENTER("cuTensorMapReplaceAddress")
  if ((size_t)map % 64) REFUSE(CUDA_ERROR_INVALID_VALUE);
  say("cuTensorMapReplaceAddress address=%p\n", address);
  memcpy(map, &address, sizeof address);  // which comes first in what cuTensorMapEncodeTiled makes
  LEAVE
}
