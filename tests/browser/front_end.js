// A front end of its own for test_front_ends.py: @jupyter-widgets/html-manager on a bare page, with a
// kernel of the server that the page came from. The test bundles it with the manager of ipywidgets 8
// (manager/) and with that of ipywidgets 7 (manager7/). It is the nearest thing to Colab's manager that runs
// without Colab, whose manager is made of the same parts.
//
// As Colab it drops the buffers of all messages, and each message that was not sent by the main thread
// while a request of the page's own was being answered. The tests' kernel marks what its background
// threads send.

import * as base from "@jupyter-widgets/base";
import { HTMLManager } from "@jupyter-widgets/html-manager";
import { CommsOverSubshells, KernelManager, ServerConnection } from "@jupyterlab/services";

const WIDGET = "application/vnd.jupyter.widget-view+json";

/** anywidget's module is an AMD one, as notebooks load it. */
function loadAnywidget(source) {
  let made = null;
  new Function("define", source)((_, make) => (made = make(base)));
  return made;
}

class FrontEnd extends HTMLManager {
  constructor(kernel, anywidget, isColab) {
    const module = loadAnywidget(anywidget);
    super({ loader: async () => module });
    if (!kernel) return;
    this.kernel = kernel;
    // Colab's kernels have no subshells: they answer a page on the main thread, between cells.
    if (isColab) kernel.commsOverSubshells = CommsOverSubshells.Disabled;
    this.isColab = isColab;
    this.dropped = 0;
    this.requests = new Set();
    // The outputs that can be updated, by their display ids.
    this.outputs = new Map();
    kernel.iopubMessage.connect((_, message) => this.note(message));
    kernel.registerCommTarget(this.comm_target_name, (comm, message) => this.open(comm, message));
  }

  /** Note which requests are being answered, and update an output. */
  note(message) {
    const { header, content, parent_header: parent } = message;
    const output = this.outputs.get(content.transient?.display_id);
    if (header.msg_type === "update_display_data" && output && this.isShown(message)) this.show(content, output);
    if (header.msg_type !== "status") return;
    if (content.execution_state === "busy") this.requests.add(parent.msg_id);
    if (content.execution_state === "idle") this.requests.delete(parent.msg_id);
  }

  /** Make a widget. */
  async open(channel, message) {
    const comm = new base.shims.services.Comm(channel);
    if (this.isColab) {
      message.buffers = [];
      const hear = comm.on_msg.bind(comm);
      comm.on_msg = (take) => hear((each) => this.pass(each, take));
    }
    await this.handle_comm_open(comm, message);
  }

  /** Hand a widget's message on, as far as Colab does. */
  pass(message, take) {
    if (this.isShown(message)) return take({ ...message, buffers: [] });
    this.dropped += 1;
    return undefined;
  }

  isShown({ metadata, parent_header: parent }) {
    return !this.isColab || (!metadata.is_background && this.requests.has(parent.msg_id));
  }

  /** Run a cell, show its outputs, and return its status once it has ended. */
  async run(code) {
    const cell = document.createElement("div");
    cell.className = "cell";
    document.body.append(cell);
    const future = this.kernel.requestExecute({ code });
    const shown = [];
    future.onIOPub = ({ header, content }) => {
      if (!["display_data", "execute_result"].includes(header.msg_type)) return;
      const output = document.createElement("div");
      cell.append(output);
      if (content.transient?.display_id) this.outputs.set(content.transient.display_id, output);
      shown.push(this.show(content, output));
    };
    const reply = await future.done;
    await Promise.all(shown);
    return reply.content.status;
  }

  async show({ data }, output) {
    if (!data[WIDGET]) {
      output.innerHTML = data["text/html"] ?? "";
      return;
    }
    const view = await this.create_view(await this.get_model(data[WIDGET].model_id));
    // ipywidgets 7's manager takes a message first.
    if (base.JUPYTER_WIDGETS_VERSION.startsWith("1.")) await this.display_view({}, view, { el: output });
    else await this.display_view(view, output);
  }
}

/** Make the widgets of a saved notebook, for which there is no kernel. */
export async function openSaved({ anywidget, state }) {
  const frontEnd = new FrontEnd(null, anywidget, false);
  await frontEnd.set_state(state);
  return frontEnd;
}

export async function start({ anywidget, isColab }) {
  const serverSettings = ServerConnection.makeSettings({ baseUrl: location.origin, wsUrl: location.origin.replace("http", "ws") });
  const manager = new KernelManager({ serverSettings });
  const kernel = await manager.startNew({ name: "python3" });
  return new FrontEnd(kernel, anywidget, isColab);
}
