//! `te_fast._native`: the dispatcher as Python sees it. Extract, call, convert; the logic is in `te_fast_core`.

mod autocast;
mod dispatch;
mod dispatch_activation;
mod dispatch_norm;
mod dispatch_norm_backward;
mod dispatch_tensors;
mod error;
mod layer;
mod linear;
mod linear_backward;
mod linear_run;
mod permute;
mod permute_call;
mod permute_cast;
mod permute_route;
mod program;
mod program_backward;
mod program_call;
mod program_check;
mod program_deferred;
mod program_functions;
mod program_layer;
mod program_nothing;
mod program_run;
mod program_tensors;
mod recipe;
mod replay;
mod state;
mod tensor;
mod weight;

use pyo3::prelude::*;

/// The native half of te_fast.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::autocast::{
        AutocastRegion, SlotsHandle, autocast_callbacks, autocast_objects, autocast_recipe, autocast_region,
        autocast_reset, autocast_set, autocast_set_depth, note_scale_change, update_scales,
    };
    #[pymodule_export]
    use crate::dispatch::{
        counters, cuda_driver_version, dequantize, device_facts, gemm, has_exchange_table, image_facts, inventory,
        note_optimizer_step, quantize, record, recorded, release_memory, reset_counters, rows_to_pad, set_auto_pad,
        set_check_device, stage_clock, stage_nanoseconds,
    };
    #[pymodule_export]
    use crate::dispatch_activation::{activation, activation_backward};
    #[pymodule_export]
    use crate::dispatch_norm::norm;
    #[pymodule_export]
    use crate::dispatch_norm_backward::norm_backward;
    #[pymodule_export]
    use crate::layer::{Geometry, LinearHandle, LinearSaved, deferral_number};
    #[pymodule_export]
    use crate::linear::{install_linear, linear_apply, linear_autograd_forward, linear_call, linear_forward};
    #[pymodule_export]
    use crate::linear_backward::{linear_backward, linear_backward_dw};
    #[pymodule_export]
    use crate::permute::{moe_apply, moe_dropped, moe_map, moe_permute, moe_unpermute, moe_unpermute_backward};
    #[pymodule_export]
    use crate::permute_cast::{moe_pad, moe_pad_list, moe_padded_splits, moe_permute_cast};
    #[pymodule_export]
    use crate::program::{ProgramHandle, WeightHandle};
    #[pymodule_export]
    use crate::program_backward::{ProgramSaved, program_backward};
    #[pymodule_export]
    use crate::program_call::{
        program_apply, program_autograd_forward, program_module_call, program_run_backward, program_run_forward,
    };
    #[pymodule_export]
    use crate::program_deferred::program_backward_dw;
    #[pymodule_export]
    use crate::program_layer::{program_layer_call, program_layer_forward};
    #[pymodule_export]
    use crate::program_nothing::program_grads_of_nothing;
    #[pymodule_export]
    use crate::recipe::NativeRecipe;
    #[pymodule_export]
    use crate::replay::{HeldRegion, autocast_held, autocast_set_first, autocast_set_recompute, autocast_take_first};
    #[pymodule_export]
    use crate::state::DispatcherCell;
    #[pymodule_export]
    use crate::tensor::instance_method;
}
