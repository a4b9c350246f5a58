//! The device, its stream and the embedded cubins: finds a kernel by name and puts it on the stream. No policy.
use crate::Error;
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

include!(concat!(env!("OUT_DIR"), "/cubins.rs"));

/// A device address, in bytes.
pub type Address = sys::CUdeviceptr;

/// One Hopper device with one stream of its own (the default stream cannot be captured in a graph).
pub struct Gpu {
    /// The device's primary context.
    pub context: Arc<CudaContext>,
    /// Where every launch goes.
    pub stream: Arc<CudaStream>,
    /// Multiprocessors.
    pub num_sms: u32,
    cubin_dir: Option<PathBuf>,
    modules: Mutex<HashMap<String, Module>>,
    kernels: Mutex<HashMap<(String, String), Kernel>>,
    constants: Mutex<HashMap<(String, String), Vec<u32>>>,
}

struct Module(sys::CUmodule);

// SAFETY: as for `Kernel`: a handle that every thread may use.
unsafe impl Send for Module {}

/// A loaded kernel. Modules stay loaded as long as the process: kernels are few and graphs may hold them.
#[derive(Clone, Copy)]
pub struct Kernel(sys::CUfunction);

// SAFETY: a CUfunction is a handle that the driver lets every thread use; it is never freed here.
unsafe impl Send for Kernel {}

/// Names the driver call in an error.
pub fn call(name: &'static str) -> impl Fn(DriverError) -> Error {
    move |source| Error::Driver { call: name, source }
}

impl Gpu {
    /// Opens device `ordinal`; `cubin_dir` overrides embedded cubins by files of the same name (to try variants).
    pub fn open(ordinal: usize, cubin_dir: Option<PathBuf>) -> Result<Self, Error> {
        // SAFETY: only asks the dynamic loader whether the library can be opened.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoDriver);
        }
        let context = CudaContext::new(ordinal).map_err(call("cuDevicePrimaryCtxRetain"))?;
        let (major, minor) = context.compute_capability().map_err(call("cuDeviceGetAttribute"))?;
        if (major, minor) != (9, 0) {
            let name = context.name().unwrap_or_default();
            return Err(Error::NotHopper { name, major, minor });
        }
        // SAFETY: called before the first allocation, so no slice holds an event that would go stale.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(call("cuStreamCreate"))?;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let num_sms = context.attribute(attribute).map_err(call("cuDeviceGetAttribute"))? as u32;
        Ok(Self {
            context,
            stream,
            num_sms,
            cubin_dir,
            modules: Mutex::default(),
            kernels: Mutex::default(),
            constants: Mutex::default(),
        })
    }

    fn module(&self, cubin: &str) -> Result<sys::CUmodule, Error> {
        let mut modules = self.modules.lock().expect("no panic under the lock");
        if let Some(m) = modules.get(cubin) {
            return Ok(m.0);
        }
        let from_dir =
            self.cubin_dir.as_ref().and_then(|d| std::fs::read(d.join(format!("{cubin}.cubin"))).ok());
        let embedded = CUBINS.iter().find(|(name, _)| *name == cubin).map(|(_, bytes)| bytes.to_vec());
        let Some(bytes) = from_dir.or(embedded) else {
            return Err(Error::Unsupported {
                field: "kernel",
                asked: cubin.into(),
                supported: "the embedded cubins",
            });
        };
        self.context.bind_to_thread().map_err(call("cuCtxSetCurrent"))?;
        // SAFETY: `bytes` is a whole cubin; the driver copies it during the call.
        let module =
            unsafe { result::module::load_data(bytes.as_ptr().cast()) }.map_err(call("cuModuleLoadData"))?;
        modules.insert(cubin.into(), Module(module));
        Ok(module)
    }

    /// Loads `function` of cubin `cubin` once and allows it `smem_bytes` of dynamic shared memory.
    pub fn kernel(&self, cubin: &str, function: &str, smem_bytes: u32) -> Result<Kernel, Error> {
        let mut kernels = self.kernels.lock().expect("no panic under the lock");
        let key = (cubin.to_string(), function.to_string());
        if let Some(k) = kernels.get(&key) {
            return Ok(*k);
        }
        let module = self.module(cubin)?;
        let name = CString::new(function).expect("kernel names hold no NUL");
        // SAFETY: the module is never unloaded.
        let f = unsafe { result::module::get_function(module, name) }.map_err(call("cuModuleGetFunction"))?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: `f` is a live function of this context.
        unsafe { result::function::set_function_attribute(f, attribute, smem_bytes as i32) }
            .map_err(call("cuFuncSetAttribute"))?;
        let wide = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        // SAFETY: as above; it only allows clusters of up to 16 blocks.
        unsafe { result::function::set_function_attribute(f, wide, 1) }
            .map_err(call("cuFuncSetAttribute"))?;
        kernels.insert(key, Kernel(f));
        Ok(Kernel(f))
    }

    /// Reads constants that a kernel's build exports (tile sizes, shared memory), so that the host mirrors none of them.
    pub fn constants<const N: usize>(&self, cubin: &str, symbol: &str) -> Result<[u32; N], Error> {
        let mut constants = self.constants.lock().expect("no panic under the lock");
        let key = (cubin.to_string(), symbol.to_string());
        if !constants.contains_key(&key) {
            let module = self.module(cubin)?;
            let name = CString::new(symbol).expect("symbols hold no NUL");
            let (mut address, mut bytes) = (0, 0usize);
            // SAFETY: the module is live; the call only fills the two out-parameters.
            unsafe { sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, module, name.as_ptr()) }
                .result()
                .map_err(call("cuModuleGetGlobal"))?;
            let mut words = vec![0u32; bytes / 4];
            // SAFETY: the symbol is `bytes` long.
            unsafe { result::memcpy_dtoh_sync(&mut words, address) }.map_err(call("cuMemcpyDtoH"))?;
            constants.insert(key.clone(), words);
        }
        let words = &constants[&key];
        words.as_slice().try_into().map_err(|_| Error::Unsupported {
            field: "cubin constants",
            asked: format!("{N} words of {cubin}.{symbol}"),
            supported: "cubins built with this crate",
        })
    }

    /// Puts one kernel on the stream.
    ///
    /// # Safety
    /// `params` point to values of exactly the kernel's parameter types, and every address in them is valid for what the
    /// kernel does until the stream has run it.
    pub unsafe fn launch(
        &self,
        kernel: Kernel,
        grid: (u32, u32, u32),
        block: u32,
        smem_bytes: u32,
        params: &mut [*mut c_void],
    ) -> Result<(), Error> {
        // SAFETY: the caller vouches for the parameters; the function and stream live as long as `self`.
        unsafe {
            result::launch_kernel(kernel.0, grid, (block, 1, 1), smem_bytes, self.stream.cu_stream(), params)
        }
        .map_err(call("cuLaunchKernel"))
    }

    /// As `launch`, in clusters of `ranks` blocks side by side in x.
    ///
    /// # Safety
    /// As `launch`.
    pub unsafe fn launch_clusters(
        &self,
        kernel: Kernel,
        grid: (u32, u32, u32),
        ranks: u32,
        block: u32,
        smem_bytes: u32,
        params: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let mut attribute = cluster_attribute(ranks);
        let config = self.config(grid, block, smem_bytes, &mut attribute);
        // SAFETY: the configuration outlives the call; the rest is vouched for by the caller.
        unsafe { sys::cuLaunchKernelEx(&config, kernel.0, params.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(call("cuLaunchKernelEx"))
    }

    /// Clusters of `ranks` blocks of `kernel` that the device holds side by side.
    pub fn clusters_at_once(
        &self,
        kernel: Kernel,
        ranks: u32,
        block: u32,
        smem_bytes: u32,
    ) -> Result<u32, Error> {
        let mut attribute = cluster_attribute(ranks);
        let config = self.config((ranks, 1, 1), block, smem_bytes, &mut attribute);
        let mut clusters = 0;
        // SAFETY: the configuration outlives the call, which only fills `clusters`.
        unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, kernel.0, &config) }
            .result()
            .map_err(call("cuOccupancyMaxActiveClusters"))?;
        Ok(clusters.max(0) as u32)
    }

    fn config(
        &self,
        grid: (u32, u32, u32),
        block: u32,
        smem_bytes: u32,
        attribute: &mut sys::CUlaunchAttribute,
    ) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: smem_bytes,
            hStream: self.stream.cu_stream(),
            attrs: attribute,
            numAttrs: 1,
        }
    }

    /// Puts `word` into each of `words` 32-bit words, in the stream's order.
    ///
    /// # Safety
    /// The words are device memory that nothing else uses until the stream has filled it.
    pub unsafe fn fill(&self, address: Address, words: u64, word: u32) -> Result<(), Error> {
        // SAFETY: the caller vouches for the words.
        unsafe { sys::cuMemsetD32Async(address, word, words as usize, self.stream.cu_stream()) }
            .result()
            .map_err(call("cuMemsetD32Async"))
    }

    /// Copies `host` to `address` in the stream's order; `host` is free when the call returns. (A copy outside the stream may still be on its
    /// way when the stream's next kernel starts.)
    ///
    /// # Safety
    /// The bytes are device memory that nothing outside the stream uses until it has run the copy.
    pub unsafe fn copy<T: Copy>(&self, address: Address, host: &[T]) -> Result<(), Error> {
        // SAFETY: the caller vouches for the memory; plain data is copied, from pageable memory and so staged before the call returns.
        unsafe { result::memcpy_htod_async(address, host, self.stream.cu_stream()) }
            .map_err(call("cuMemcpyHtoDAsync"))
    }

    /// Waits for everything on the stream.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.stream.synchronize().map_err(call("cuStreamSynchronize"))
    }
}

fn cluster_attribute(ranks: u32) -> sys::CUlaunchAttribute {
    let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
    value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: ranks, y: 1, z: 1 };
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value,
    }
}

/// Device memory, freed when dropped: callers wait for what still uses it.
#[derive(Debug)]
pub struct Memory {
    /// Of the first byte; a multiple of 256.
    pub address: Address,
    /// At least 256.
    pub bytes: usize,
}

impl Memory {
    /// At least `bytes` bytes, of any content.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self, Error> {
        gpu.context.bind_to_thread().map_err(call("cuCtxSetCurrent"))?;
        // SAFETY: a plain allocation in the bound context.
        let address = unsafe { result::malloc_sync(bytes.max(256)) }.map_err(call("cuMemAlloc"))?;
        Ok(Self { address, bytes: bytes.max(256) })
    }

    /// The bytes of `host`.
    pub fn from_slice<T: Copy>(gpu: &Gpu, host: &[T]) -> Result<Self, Error> {
        let memory = Self::new(gpu, size_of_val(host))?;
        memory.write(0, host)?;
        Ok(memory)
    }

    /// Copies `host` to byte offset `offset`; the bytes are there when it returns. Panics past the end.
    pub fn write<T: Copy>(&self, offset: usize, host: &[T]) -> Result<(), Error> {
        assert!(offset + size_of_val(host) <= self.bytes);
        // cuMemcpyHtoD returns once pageable memory has been read, maybe before it has arrived, and streams of one's own do not wait for it.
        // SAFETY: the range was just checked; plain data is copied. The default stream always exists.
        unsafe {
            result::memcpy_htod_sync(self.address + offset as u64, host).map_err(call("cuMemcpyHtoD"))?;
            result::stream::synchronize(std::ptr::null_mut()).map_err(call("cuStreamSynchronize"))
        }
    }

    /// Copies `len` numbers from byte offset `offset`. Panics past the end.
    pub fn read<T: Copy + Default>(&self, offset: usize, len: usize) -> Result<Vec<T>, Error> {
        let mut host = vec![T::default(); len];
        assert!(offset + size_of_val(&host[..]) <= self.bytes);
        // SAFETY: the range was just checked; T is plain data (integers and floats).
        unsafe { result::memcpy_dtoh_sync(&mut host, self.address + offset as u64) }
            .map_err(call("cuMemcpyDtoH"))?;
        Ok(host)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once.
        let _ = unsafe { result::free_sync(self.address) };
    }
}
