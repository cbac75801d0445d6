/* libFuzzer's door to the compiled decoders of kvmnn, which run inside an embedded Python: guided.sh builds it.
 *
 * KVMNN_FUZZ names the target of guided.py. What it gives back for a frame is compared with plain loops written after
 * docs/format.md: the same verdict, the same bytes. What the zstd writer makes of words has to decode to them in the
 * same way. For pickles, only errors that users may see are passed over. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1 << 16 };  /* words of a frame that is decoded: larger ones are only opened */

static PyObject *target;
static int is_frames, is_writer;
static size_t (*zstd_decompress)(void *, size_t, const void *, size_t);
static uint8_t lanes[4][MOST], words[4 * MOST];

static void die(const char *what) {
    if (PyErr_Occurred()) PyErr_Print();
    fprintf(stderr, "FOUND: %s\n", what);
    abort();
}

static size_t number(const uint8_t *p) {
    return (size_t)p[0] | (size_t)p[1] << 8 | (size_t)p[2] << 16 | (size_t)p[3] << 24;
}

static int runs(const uint8_t *from, size_t n, uint8_t *to, size_t expected) {
    size_t filled = 0;
    for (size_t i = 0; i < n;) {
        int control = from[i++];
        size_t length = control < 128 ? (size_t)control + 1 : (size_t)control - 128 + 4;
        if (filled + length > expected || i + (control < 128 ? length : 1) > n) return 0;
        for (size_t k = 0; k < length; ++k) to[filled++] = control < 128 ? from[i++] : from[i];
        if (control >= 128) ++i;
    }
    return n > 0 && filled == expected;
}

/* Streams of the frame: 2 or 4 where it decodes, to `words`; else 0. */
static int reference(const uint8_t *data, size_t n) {
    size_t at = 4, count;
    int stride = 0;
    if (n < 4 || (count = number(data)) == 0 || count > MOST) return 0;
    while (stride < 4 && !(stride == 2 && at == n)) {
        if (n - at < 10) return 0;
        int mode = data[at], codec = data[at + 1];
        size_t raw = number(data + at + 2), size = number(data + at + 6);
        const uint8_t *payload = data + at + 10;
        uint8_t *lane = lanes[stride];
        if (raw != count || size > n - at - 10 || mode > 2 || codec > 1) return 0;
        if (codec == 0 ? !runs(payload, size, lane, raw)
                       : size == 0 || zstd_decompress(lane, raw, payload, size) != raw) return 0;
        for (size_t i = 1; i < raw && mode; ++i)
            lane[i] = mode == 1 ? (uint8_t)(lane[i] + lane[i - 1]) : lane[i] ^ lane[i - 1];
        at += 10 + size;
        ++stride;
    }
    if (at != n) return 0;
    for (size_t i = 0; i < count; ++i)
        for (int lane = 0; lane < stride; ++lane) words[i * stride + lane] = lanes[lane][i];
    return stride;
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    PyPreConfig before;
    PyConfig config;
    const char *name = getenv("KVMNN_FUZZ");
    (void)argc, (void)argv;
    PyPreConfig_InitPythonConfig(&before);
    before.allocator = PYMEM_ALLOCATOR_MALLOC;  /* so that the address sanitizer sees every buffer */
    Py_PreInitialize(&before);
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 0;
    if (PyStatus_Exception(Py_InitializeFromConfig(&config)) || name == NULL) die("no Python, or KVMNN_FUZZ not set");
    PyConfig_Clear(&config);
    is_frames = strcmp(name, "frames") == 0;
    is_writer = strcmp(name, "writer") == 0;
    PyObject *module = PyImport_ImportModule("guided");
    PyObject *address = module ? PyObject_CallMethod(module, "zstd_decompress", NULL) : NULL;
    target = module ? PyObject_GetAttrString(module, name) : NULL;
    if (target == NULL || address == NULL) die("guided.py");
    zstd_decompress = (size_t(*)(void *, size_t, const void *, size_t))PyLong_AsVoidPtr(address);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const uint8_t nothing[1];
    PyObject *view = PyMemoryView_FromMemory((char *)(size ? data : nothing), (Py_ssize_t)size, PyBUF_READ);
    PyObject *found = view ? PyObject_CallOneArg(target, view) : NULL;
    Py_XDECREF(view);
    if (found == NULL) die("an exception that is no refusal");
    if (is_frames && !(size >= 4 && number(data) > MOST)) {
        int stride = reference(data, size);
        if ((stride == 0) != (found == Py_None)) die(stride ? "refused, but it decodes" : "decoded, but it does not");
        if (stride) {
            size_t n = number(data) * (size_t)stride;
            if ((size_t)PyByteArray_GET_SIZE(found) != n || memcmp(PyByteArray_AS_STRING(found), words, n) != 0)
                die("decoded to other bytes");
        }
    }
    if (is_writer && found != Py_None) {
        PyObject *frame = PyTuple_GetItem(found, 0), *raw = PyTuple_GetItem(found, 1);
        size_t n = (size_t)PyBytes_Size(raw);
        int stride = reference((uint8_t *)PyBytes_AsString(frame), (size_t)PyBytes_Size(frame));
        if (stride == 0 || number((uint8_t *)PyBytes_AsString(frame)) * (size_t)stride != n) die("it does not decode");
        if (memcmp(PyBytes_AsString(raw), words, n) != 0) die("it decodes to other words");
    }
    Py_DECREF(found);
    return 0;
}
